"""The compile report as a page of Markdown."""

from collections.abc import Sequence
from itertools import groupby

import triton

from pageray.kernels.gpu.compile_targets import KernelReport

_HEADER = (
    "kernel",
    "device",
    "model",
    "variant",
    "registers",
    "shared bytes",
    "spilled bytes",
    "instructions",
)

_PAGE = """# Resources of the Triton kernels

Compiled ahead of time with Triton {version} on a machine without a GPU; nothing here was run or timed. From

```console
make kernels-report ARGS="--out benchmarks/results/kernels-report.md"
```

One row per kernel, device, model and variant of its attention, each figure the largest over bfloat16 and float16. Registers are per thread (on gfx942 vector registers, accumulators among them), shared memory (LDS) is per
thread block, spills are bytes of memory per thread. {num_compiled} compiled, {num_bad} spill or exceed the device's
shared memory.

{table}
"""


def format_page(reports: Sequence[KernelReport]) -> str:
    """The whole page: how it was made, and the table."""
    return _PAGE.format(
        version=triton.__version__,
        num_compiled=len(reports),
        num_bad=sum(not report.fits for report in reports),
        table=_format_table(reports),
    )


def _format_table(reports: Sequence[KernelReport]) -> str:
    def key(report: KernelReport) -> tuple[str, str, str, str]:
        target = report.target
        return report.kernel, target.device.name, target.shape.name, target.variant.name

    rows = [_row(*names, list(group)) for names, group in groupby(sorted(reports, key=key), key)]
    widths = [max(map(len, column)) for column in zip(_HEADER, *rows, strict=True)]
    lines = [_HEADER, tuple("-" * width for width in widths), *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(n) for cell, n in zip(line, widths, strict=True)) + " |"
        for line in lines
    )


def _row(
    kernel: str, device: str, model: str, variant: str, group: Sequence[KernelReport]
) -> tuple[str, ...]:
    instructions = sorted({name for report in group for name in report.code.instructions})
    if not all(report.fits for report in group):
        instructions.append("**does not fit**")
    return (
        kernel.removesuffix("_kernel"),
        device,
        model,
        variant,
        str(max(report.code.registers for report in group)),
        str(max(report.shared_bytes for report in group)),
        str(max(report.code.local_bytes for report in group)),
        ", ".join(instructions),
    )
