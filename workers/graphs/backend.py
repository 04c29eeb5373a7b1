"""Recording device work and running it again without the host: the one place that knows CUDA."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from pageray.cluster.config import EngineConfig

Work = Callable[[], Tensor | None]
"""Launches device work on tensors whose addresses stay, and returns where its result will be."""


class GraphBackend(Protocol):
    """One set of recordings that share scratch memory: only one replay's result is valid at a
    time, and it is gone with the next replay."""

    def capture(self, work: Work) -> Work:
        """Run `work` once, so that nothing is compiled or set up later, then record it.

        The returned call replays the recording and gives the same tensor every time. What Python
        does in `work` happens during `capture` only.
        """
        ...


GraphBackendFactory = Callable[[], GraphBackend]


class CudaGraphBackend:
    """`torch.cuda.CUDAGraph`s with one memory pool.

    Tensors that `work` allocates (the partials of the attention kernels among them) come from
    that pool and live as long as the graphs do.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def capture(self, work: Work) -> Work:
        # On the stream of the capture: cuBLAS has a workspace for each stream.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog asks after its events from a thread of its own; in the mode "global"
        # that would break the capture.
        with torch.cuda.graph(
            graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"
        ):
            result = work()

        def replay() -> Tensor | None:
            graph.replay()
            return result

        return replay


def graph_backend_factory(config: EngineConfig, device: torch.device) -> GraphBackendFactory | None:
    """None where every step is launched by the host: on CPU, or as configured."""
    if device.type != "cuda" or config.enforce_eager:
        return None
    return lambda: CudaGraphBackend(device)
