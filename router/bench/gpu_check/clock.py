"""Timing device work: on CUDA through a captured graph and events, on CPU by the wall clock."""

import statistics
import time
from collections.abc import Callable
from typing import Protocol

import torch

from pageray.workers.graphs.backend import CudaGraphBackend

Work = Callable[[], None]


class Clock(Protocol):
    def rounds_s(self, work: Work, num_rounds: int) -> list[float]:
        """Seconds of each of `num_rounds` runs of `work`, which has run before."""
        ...


class CudaClock:
    """`work` is captured, so that what the host takes to launch it does not count."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def rounds_s(self, work: Work, num_rounds: int) -> list[float]:
        replay = CudaGraphBackend(self._device).capture(work)
        pairs = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(num_rounds)
        ]
        replay()
        for begin, end in pairs:
            begin.record()
            replay()
            end.record()
        torch.cuda.synchronize(self._device)
        return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]


class CpuClock:
    """For trying out what runs around the kernels."""

    def rounds_s(self, work: Work, num_rounds: int) -> list[float]:
        work()
        return [_seconds(work) for _ in range(num_rounds)]


def clock_for(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else CpuClock()


def median_call_s(clock: Clock, work: Work, num_calls: int, num_rounds: int) -> float:
    """Median over the rounds of the mean time of one of the `num_calls` calls in `work`."""
    return statistics.median(clock.rounds_s(work, num_rounds)) / num_calls


def _seconds(work: Work) -> float:
    begun_s = time.perf_counter()
    work()
    return time.perf_counter() - begun_s
