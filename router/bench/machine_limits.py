"""What this machine can do at best, measured: reading memory, and multiplying matrices."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_ROUNDS = 7
_READ_BYTES = 1 << 29
_MATMUL_SIZES = (1024, 2048, 2048)


@dataclass(frozen=True)
class MachineLimits:
    read_bytes_per_s: float
    flop_per_s: float
    """Of a matrix product in the dtype that was asked for."""


def measure_limits(dtype: torch.dtype) -> MachineLimits:
    """Best of some rounds each, with all cores this process may use."""
    numbers = torch.ones(_READ_BYTES // 4, dtype=torch.float32)
    m, k, n = _MATMUL_SIZES
    a, b = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
    read_s = _best_s(numbers.sum)
    matmul_s = _best_s(lambda: torch.nn.functional.linear(a, b))
    return MachineLimits(_READ_BYTES / read_s, 2.0 * m * k * n / matmul_s)


def _best_s(work: Callable[[], object]) -> float:
    times: list[float] = []
    with torch.inference_mode():
        work()
        for _ in range(_ROUNDS):
            begun_s = time.perf_counter()
            work()
            times.append(time.perf_counter() - begun_s)
    return statistics.quantiles(times, n=4)[0]
