"""A kernel launch as data: what runs, on which grid, with which arguments.

Every launcher in this package builds a `Launch` and hands it to `run`. The same `Launch`, built
from tensors without memory (`device="meta"`), is what `compile_report.py` compiles, so the report
is about the very specialisations that are launched.
"""

# pyright: reportArgumentType=false
# Reason: Triton types the positional arguments of a jitted function as those of its Python body.

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import triton.language as tl
from torch import Tensor

from pageray.kernels.gpu.precision import IS_INTERPRETED

ENABLE_FP_FUSION = True
"""Pinned: Triton's default changes between versions, and the bits of a result with it."""


Backend = Literal["cuda", "hip"]
"""Triton's names for NVIDIA's and AMD's compiler."""
BACKEND: Backend = "hip" if torch.version.hip else "cuda"


class Kernel(Protocol):
    """A `@triton.jit` function, compiled or interpreted: index with a grid, call with arguments."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]: ...


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch. `args` are the runtime arguments, `constants` the compile-time ones, by name."""

    kernel: Kernel
    grid: tuple[int, ...]
    args: Mapping[str, Tensor | int | float | None]
    """None stands for a tensor that the kernel can do without; Triton makes it a constant."""
    constants: Mapping[str, int | bool | tl.dtype]
    num_warps: int = 4
    num_stages: int = 1
    hip_num_stages: int = 1
    """In place of num_stages on AMD GPUs, whose loads pass through registers on their way."""

    def stages_on(self, backend: Backend) -> int:
        """How deep loads are prefetched."""
        return self.num_stages if backend == "cuda" else self.hip_num_stages


def run(launch: Launch) -> None:
    """Queue the launch on the current stream of its tensors' device; an empty grid is no launch.

    Raises ValueError when the tensors are not all on one CUDA device. Under Triton's interpreter
    (TRITON_INTERPRET=1 at import) tensors on the CPU are accepted too.
    """
    if 0 in launch.grid:
        return
    device = _common_device(launch.args)
    if device.type != "cuda" and not (IS_INTERPRETED and device.type == "cpu"):
        raise ValueError(
            f"The Triton kernels need tensors on a CUDA device, got {device}. Move them there, use "
            "the cpu ops, or set TRITON_INTERPRET=1 before the first import to run interpreted."
        )
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        launch.kernel[launch.grid](
            **launch.args,
            **launch.constants,
            num_warps=launch.num_warps,
            num_stages=launch.stages_on(BACKEND),
            enable_fp_fusion=ENABLE_FP_FUSION,
        )


def _common_device(args: Mapping[str, Tensor | int | float | None]) -> torch.device:
    devices = {name: arg.device for name, arg in args.items() if isinstance(arg, Tensor)}
    distinct = set(devices.values())
    if len(distinct) != 1:
        raise ValueError(f"Every tensor must be on one device, got {devices}.")
    return distinct.pop()
