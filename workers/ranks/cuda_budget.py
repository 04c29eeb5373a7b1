"""How much of a CUDA device the KV pool may have."""

from dataclasses import dataclass

from pageray.cluster.errors import ConfigError

RESERVE_BYTES = 512 << 20
"""Left free beside everything that was measured: allocator slack, NCCL."""


@dataclass(frozen=True, kw_only=True)
class DeviceUse:
    """Bytes of one device, with the weights in place and no KV pool."""

    total: int
    free: int
    activations: int
    """What the largest step takes on top of the weights, at its peak; not taken at the moment."""
    graphs: int
    """What captured graphs will take; not taken at the moment."""


def pool_budget_bytes(use: DeviceUse, utilization: float) -> int:
    """Bytes left for the pool. Raises `ConfigError` with the numbers when nothing is."""
    allowed, taken = int(use.total * utilization), use.total - use.free
    budget = allowed - taken - use.activations - use.graphs - RESERVE_BYTES
    if budget <= 0:
        raise ConfigError(
            f"After weights, activations and CUDA graphs nothing is left for the KV pool: the "
            f"device has {use.total:,} bytes, gpu_memory_utilization allows {allowed:,}, "
            f"{taken:,} are taken, a step needs {use.activations:,} and the graphs "
            f"{use.graphs:,}; {RESERVE_BYTES:,} must be left."
        )
    return budget
