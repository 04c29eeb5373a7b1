"""A graph backend without a GPU: a replay runs the recorded work again, on the same tensors."""

from torch import Tensor

from pageray.workers.graphs.backend import Work


class FakeGraphBackend:
    """What differs from CUDA: Python runs in a replay too. Results have one address, as there."""

    def __init__(self) -> None:
        self.num_captured = 0
        self.num_replays = 0

    def capture(self, work: Work) -> Work:
        work()
        result = work()
        self.num_captured += 1

        def replay() -> Tensor | None:
            self.num_replays += 1
            again = work()
            if result is not None and again is not None:
                result.copy_(again)
            return result

        return replay
