"""Compile every kernel ahead of time, on a machine without a GPU, and report what it takes.

`python -m pageray.kernels.gpu.compile_report` prints registers, shared memory and spills of each
kernel at the head shapes of known models. The launches are those of the launchers, built from
tensors without memory, and specialised as Triton's JIT would: an integer argument equal to 1 is a
constant, a pointer or an integer divisible by 16 is known to be.

Needs a process without TRITON_INTERPRET, because interpreted functions cannot be compiled.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Protocol, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from tqdm import tqdm
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from pageray.kernels.gpu.compile_targets import CompileTarget, KernelReport, all_targets
from pageray.kernels.gpu.compiled_code import read_code
from pageray.kernels.gpu.launch import ENABLE_FP_FUSION, Launch
from pageray.kernels.gpu.model_launches import launches_of
from pageray.kernels.gpu.report_table import format_page


def compile_all(targets: Sequence[CompileTarget]) -> list[KernelReport]:
    """Compile every kernel for every target, in a process per core; progress goes to stderr.

    Raises RuntimeError under TRITON_INTERPRET.
    """
    num_processes = min(len(targets), os.cpu_count() or 1)
    # Spawned: a fork would inherit the locks of torch's threads.
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        parts = tqdm(
            pool.map(compile_target, targets),
            total=len(targets),
            unit="target",
            disable=not sys.stderr.isatty(),
        )
        return [report for part in parts for report in part]


def compile_target(target: CompileTarget) -> list[KernelReport]:
    """Compile every kernel for one target."""
    return [
        compile_launch(launch, target)
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
    device = target.device
    compiled = cast(
        "_Compiled",
        triton.compile(
            _source(kernel, launch),
            target=device.triton_target,
            options={
                "num_warps": launch.num_warps,
                "num_stages": launch.stages_on(device.backend),
                "enable_fp_fusion": ENABLE_FP_FUSION,
            },
        ),
    )
    return KernelReport(
        kernel=kernel.__name__,
        target=target,
        shared_bytes=compiled.metadata.shared,
        code=read_code(compiled.asm),
    )


class _Jitted(Protocol):
    """The part of a `JITFunction` that is read here."""

    __name__: str
    arg_names: list[str]


class _Metadata(Protocol):
    shared: int


class _Compiled(Protocol):
    """The part of `triton.compile`'s result that is read here."""

    asm: dict[str, bytes | str]
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


def main() -> None:
    """Print the report of the whole matrix. Exit status 1 when a kernel does not fit."""
    parser = argparse.ArgumentParser(description="Resources of every Triton kernel.")
    parser.add_argument("--out", type=Path, help="write the report to this file too, as Markdown")
    out = cast("Path | None", parser.parse_args().out)
    reports = compile_all(all_targets())
    page = format_page(reports)
    print(page)
    if out is not None:
        out.write_text(page)
    if not all(report.fits for report in reports):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
