"""What kernels are compiled for ahead of time, and what came of it."""

from dataclasses import dataclass

import torch
from triton.backends.compiler import GPUTarget

from pageray.kernels.gpu.attention_variants import PLAIN, VARIANTS, AttentionVariant
from pageray.kernels.gpu.compiled_code import CodeFacts
from pageray.kernels.gpu.launch import Backend
from pageray.kernels.gpu.model_launches import MODEL_SHAPES, VARIANT_SHAPES, ModelShape


@dataclass(frozen=True, kw_only=True)
class Device:
    """One generation of GPUs."""

    name: str
    backend: Backend
    architecture: int | str
    """Compute capability times 10, or AMD's name of the architecture."""
    warp_size: int
    max_shared_bytes: int
    """Shared memory (LDS) that one thread block (work group) may take."""
    has_e4m3: bool
    """Whether float8_e4m3fn is there; `checks.check_e4m3` refuses it elsewhere."""

    @property
    def triton_target(self) -> GPUTarget:
        """The device as Triton's compiler takes it."""
        return GPUTarget(self.backend, self.architecture, self.warp_size)


def _nvidia(capability: int, max_shared_bytes: int) -> Device:
    return Device(
        name=f"sm_{capability}",
        backend="cuda",
        architecture=capability,
        warp_size=32,
        max_shared_bytes=max_shared_bytes,
        has_e4m3=capability >= 89,
    )


# CUDA programming guide, technical specifications per compute capability.
SM_80 = _nvidia(80, 163 * 1024)
SM_90 = _nvidia(90, 227 * 1024)
SM_100 = _nvidia(100, 227 * 1024)
# AMD Instinct MI300 instruction set architecture: 64 KiB of LDS per compute unit.
GFX942 = Device(
    name="gfx942",
    backend="hip",
    architecture="gfx942",
    warp_size=64,
    max_shared_bytes=64 * 1024,
    has_e4m3=False,
)
DEVICES = (SM_80, SM_90, SM_100, GFX942)


@dataclass(frozen=True, kw_only=True)
class CompileTarget:
    """One row of the matrix to compile."""

    device: Device
    shape: ModelShape
    dtype: torch.dtype
    variant: AttentionVariant = PLAIN


def all_targets() -> list[CompileTarget]:
    """Every device, model shape and 16-bit dtype; then the variants, in bfloat16."""
    plain = [
        CompileTarget(device=device, shape=shape, dtype=dtype)
        for device in DEVICES
        for shape in MODEL_SHAPES
        for dtype in (torch.bfloat16, torch.float16)
    ]
    variants = [
        CompileTarget(device=device, shape=shape, dtype=torch.bfloat16, variant=variant)
        for device in DEVICES
        for shape in VARIANT_SHAPES
        for variant in VARIANTS
        if variant.kv_dtype is None or device.has_e4m3
    ]
    return plain + variants


@dataclass(frozen=True, kw_only=True)
class KernelReport:
    """What the compiler made of one kernel."""

    kernel: str
    target: CompileTarget
    shared_bytes: int
    """Per thread block."""
    code: CodeFacts

    @property
    def fits(self) -> bool:
        """No spill, and the shared memory is there."""
        limit = self.target.device.max_shared_bytes
        return self.code.local_bytes == 0 and self.shared_bytes <= limit
