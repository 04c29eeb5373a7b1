"""The device under test: what runs there, how it is timed, how large inputs may be."""

from dataclasses import dataclass
from typing import Protocol, cast

import torch

from pageray.kernels.dispatch import default_ops
from pageray.kernels.gpu.model_launches import ModelShape
from pageray.kernels.ops import Ops
from pageray.router.bench.gpu_check.clock import Clock, clock_for
from pageray.router.bench.gpu_check.kernel_call import Setting

_CPU_L2_BYTES = 1 << 12
_CPU_MEMORY_BYTES = 1 << 28
_NUM_ROUNDS = 50
_NUM_QUICK_ROUNDS = 2
_SEED = 20240607


class _Properties(Protocol):
    """The part of torch's device properties that is used; its stubs leave the class out."""

    total_memory: int
    L2_cache_size: int


@dataclass(frozen=True, kw_only=True)
class BenchDevice:
    device: torch.device
    ops: Ops
    clock: Clock
    num_rounds: int
    memory_bytes: int
    l2_bytes: int
    is_quick: bool
    """Tiny shapes, to try out the plumbing: the figures mean nothing."""

    @classmethod
    def of(cls, device: torch.device, is_quick: bool) -> "BenchDevice":
        memory_bytes, l2_bytes = _CPU_MEMORY_BYTES, _CPU_L2_BYTES
        if device.type == "cuda":
            properties = cast("_Properties", torch.cuda.get_device_properties(device))
            memory_bytes, l2_bytes = properties.total_memory, properties.L2_cache_size
        return cls(
            device=device,
            ops=default_ops(device),
            clock=clock_for(device),
            num_rounds=_NUM_QUICK_ROUNDS if is_quick else _NUM_ROUNDS,
            memory_bytes=memory_bytes,
            l2_bytes=l2_bytes,
            is_quick=is_quick,
        )

    def setting(self, shape: ModelShape, num_tokens: int, dtype: torch.dtype) -> Setting:
        """The same numbers every time it is asked for."""
        generator = torch.Generator(self.device).manual_seed(_SEED)
        return Setting(shape=shape, num_tokens=num_tokens, dtype=dtype, generator=generator)
