"""Compile every kernel ahead of time, on a machine without a GPU, and report what it takes.

`python -m pageray.kernels.gpu.compile_report` prints registers, shared memory and spills of each
kernel at the head shapes of known models. The launches are those of the launchers, built from
tensors without memory, and specialised as Triton's JIT would: an integer argument equal to 1 is a
constant, a pointer or an integer divisible by 16 is known to be.

Needs a process without TRITON_INTERPRET, because interpreted functions cannot be compiled.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from pageray.kernels.gpu.attention_variants import PLAIN, VARIANTS, AttentionVariant
from pageray.kernels.gpu.launch import ENABLE_FP_FUSION, Launch
from pageray.kernels.gpu.model_launches import MODEL_SHAPES, VARIANT_SHAPES, ModelShape, launches_of

SHARED_LIMIT_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Shared memory that one thread block may take, by compute capability (CUDA programming guide)."""


_MIN_E4M3_CAPABILITY = 89
"""Below it Triton does not compile float8_e4m3fn; `checks.check_e4m3` refuses it there."""


@dataclass(frozen=True, kw_only=True)
class CompileTarget:
    """One row of the matrix to compile."""

    capability: int
    """80, 90 or 100."""
    shape: ModelShape
    dtype: torch.dtype
    variant: AttentionVariant = PLAIN


@dataclass(frozen=True, kw_only=True)
class KernelReport:
    """What ptxas made of one kernel."""

    kernel: str
    target: CompileTarget
    registers: int
    """Per thread."""
    shared_bytes: int
    """Per thread block."""
    local_bytes: int
    """Per thread: registers spilled to memory. 0 is no spill."""

    @property
    def fits(self) -> bool:
        """No spill, and the shared memory is there."""
        limit = SHARED_LIMIT_BYTES[self.target.capability]
        return self.local_bytes == 0 and self.shared_bytes <= limit


def all_targets() -> list[CompileTarget]:
    """Every capability, model shape and 16-bit dtype; then the variants."""
    plain = [
        CompileTarget(capability=capability, shape=shape, dtype=dtype)
        for capability in SHARED_LIMIT_BYTES
        for shape in MODEL_SHAPES
        for dtype in (torch.bfloat16, torch.float16)
    ]
    return plain + variant_targets()


def variant_targets() -> list[CompileTarget]:
    """Every variant that a capability can run, for every head dim, in bfloat16."""
    return [
        CompileTarget(capability=capability, shape=shape, dtype=torch.bfloat16, variant=variant)
        for capability in SHARED_LIMIT_BYTES
        for shape in VARIANT_SHAPES
        for variant in VARIANTS
        if variant.kv_dtype is None or capability >= _MIN_E4M3_CAPABILITY
    ]


def compile_all(targets: Iterable[CompileTarget]) -> list[KernelReport]:
    """Compile every kernel for every target. Raises RuntimeError under TRITON_INTERPRET."""
    return [
        compile_launch(launch, target)
        for target in targets
        for launch in launches_of(target.shape, target.dtype, target.variant)
    ]


def compile_launch(launch: Launch, target: CompileTarget) -> KernelReport:
    """Compile one launch as the JIT would at its first call."""
    if not isinstance(launch.kernel, JITFunction):
        raise RuntimeError(
            "Kernels are interpreted in this process and cannot be compiled; start one without "
            "TRITON_INTERPRET in its environment."
        )
    kernel = cast("_Jitted", launch.kernel)
    compiled = cast(
        "_Compiled",
        triton.compile(
            _source(kernel, launch),
            target=GPUTarget("cuda", target.capability, 32),
            options={
                "num_warps": launch.num_warps,
                "num_stages": launch.num_stages,
                "enable_fp_fusion": ENABLE_FP_FUSION,
            },
        ),
    )
    registers, local_bytes = _resource_usage(compiled.asm["cubin"])
    return KernelReport(
        kernel=kernel.__name__,
        target=target,
        registers=registers,
        shared_bytes=compiled.metadata.shared,
        local_bytes=local_bytes,
    )


class _Jitted(Protocol):
    """The part of a `JITFunction` that is read here."""

    __name__: str
    arg_names: list[str]


class _Metadata(Protocol):
    shared: int


class _Compiled(Protocol):
    """The part of `triton.compile`'s result that is read here."""

    asm: dict[str, bytes]
    metadata: _Metadata


_TYPE_NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int64: "i64",
    torch.int32: "i32",
}

_Constant = int | bool | tl.dtype | None


def _source(kernel: "_Jitted", launch: Launch) -> ASTSource:
    signature: dict[str, str] = {}
    constants: dict[tuple[int], _Constant] = {}
    attributes: dict[tuple[int], list[list[str | int]]] = {}
    for position, name in enumerate(kernel.arg_names):
        value = launch.args[name] if name in launch.args else launch.constants[name]
        # A tensor left out is a constant to the JIT, as a 1 is.
        is_constant = (
            name in launch.constants or value is None or (isinstance(value, int) and value == 1)
        )
        if is_constant and not isinstance(value, (Tensor, float)):
            signature[name] = "constexpr"
            constants[position,] = value
        elif isinstance(value, Tensor):
            signature[name] = "*" + _TYPE_NAMES[value.dtype]
            attributes[position,] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0:
                attributes[position,] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    return ASTSource(kernel, signature, constexprs=constants, attrs=attributes)


def _resource_usage(cubin: bytes) -> tuple[int, int]:
    """(registers per thread, bytes of local memory and stack per thread) of a one-kernel cubin."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        text = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "-res-usage", str(path)],
            capture_output=True,
            check=True,
            text=True,
        ).stdout
    usage = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return usage["REG"], usage["STACK"] + usage["LOCAL"]


def format_report(reports: Sequence[KernelReport]) -> str:
    """A table, one kernel a line, ending in how many do not fit."""
    lines = [
        f"{'target':<8}{'model':<18}{'dtype':<10}{'variant':<18}{'kernel':<26}"
        f"{'regs':>5}{'shared':>9}{'spill':>7}"
    ]
    for report in reports:
        target = report.target
        dtype = str(target.dtype).removeprefix("torch.")
        lines.append(
            f"sm_{target.capability:<5}{target.shape.name:<18}{dtype:<10}"
            f"{target.variant.name:<18}{report.kernel:<26}"
            f"{report.registers:>5}{report.shared_bytes:>9}{report.local_bytes:>7}"
            f"{'' if report.fits else '  <- does not fit'}"
        )
    num_bad = sum(not report.fits for report in reports)
    lines.append(f"{len(reports)} kernels compiled, {num_bad} spill or exceed shared memory.")
    return "\n".join(lines)


def main() -> None:
    """Print the report of the whole matrix. Exit status 1 when a kernel does not fit."""
    reports = compile_all(all_targets())
    print(format_report(reports))
    if not all(report.fits for report in reports):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
