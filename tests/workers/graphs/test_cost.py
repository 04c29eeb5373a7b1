from pageray.workers.graphs.backend import Work
from pageray.workers.graphs.cost import measure_graph_bytes
from pageray.workers.graphs.ladder import GraphShape


class Device:
    """Each capture takes the next of `costs` bytes."""

    def __init__(self, *costs: int) -> None:
        self._costs = list(costs)
        self.free = 1000

    def capture(self, shape: GraphShape) -> Work:
        self.free -= self._costs.pop(0)
        return lambda: None

    def measure(self, num_shapes: int) -> int:
        shapes = [GraphShape(size, 8) for size in range(num_shapes, 0, -1)]
        return measure_graph_bytes(self.capture, shapes, lambda: self.free)


def test_the_first_takes_the_shared_memory_and_the_second_stands_for_the_rest() -> None:
    assert Device(100, 7).measure(5) == 100 + 4 * 7


def test_a_single_graph() -> None:
    assert Device(100).measure(1) == 100


def test_memory_that_came_back_in_between_is_not_counted_against_the_first() -> None:
    assert Device(100, -30).measure(5) == 100
