"""The findings as a Markdown page."""

from collections.abc import Iterable, Sequence

from pageray.router.bench.gpu_check.figures import (
    bandwidth_share,
    compute_share,
    share_of_limit,
    speed_up,
)
from pageray.router.bench.gpu_check.findings import (
    AccuracyRow,
    AttentionRow,
    Chip,
    Findings,
    ServingRow,
    StageOutcome,
    TimingRow,
)

DRY_RUN = "A trial of the check itself, on tiny shapes: no figure here says anything about a GPU."

Row = Sequence[str]


def markdown(findings: Findings, command: str, is_dry_run: bool) -> str:
    """The whole page; sections without rows are left out."""
    title = "Dry run" if is_dry_run or findings.chip is None else findings.chip.name
    sections = [f"# {title}"]
    if is_dry_run:
        sections.append(f"**{DRY_RUN}**")
    sections.append(f"Made by `{command}`.")
    sections.append(_stages(findings.stages))
    if findings.chip is not None:
        sections.append(_chip(findings.chip))
    if findings.accuracy:
        sections.append(_accuracy(findings.accuracy))
    if findings.chip is not None:
        if findings.kernels:
            sections.append(_kernels(findings.kernels, findings.chip))
        if findings.attention:
            sections.append(_attention(findings.attention, findings.chip))
    if findings.serving:
        sections.append(_serving(findings.serving))
    return "\n\n".join(sections) + "\n"


def table(header: Row, rows: Iterable[Row], num_left: int) -> str:
    """A Markdown table; columns after the first `num_left` are aligned to the right."""
    rule = ["---" if column < num_left else "---:" for column in range(len(header))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *rows))


def _stages(stages: Sequence[StageOutcome]) -> str:
    rows = [(stage.name, stage.status, f"{stage.elapsed_s:.0f}") for stage in stages]
    text = table(("stage", "status", "s"), rows, 2)
    for stage in stages:
        if stage.message:
            text += f"\n\n`{stage.name}` ({stage.status}):\n\n```\n{stage.message}\n```"
    return text


def _chip(chip: Chip) -> str:
    rows = [
        ("memory, GiB", f"{chip.memory_bytes / 2**30:.1f}"),
        ("L2 cache, MiB", f"{chip.l2_bytes / 2**20:.1f}"),
        ("driver", chip.driver),
        ("CUDA", chip.cuda),
        ("torch", chip.torch),
        ("Triton", chip.triton),
        ("copy, GB/s read and written", f"{chip.copy_bytes_per_s / 1e9:.0f}"),
        (f"matrix product in {chip.matmul_dtype}, TFLOP/s", f"{chip.matmul_flop_per_s / 1e12:.1f}"),
    ]
    return "## Device\n\n" + table(("", ""), rows, 1)


def _accuracy(accuracy: Sequence[AccuracyRow]) -> str:
    """The worst shape of each operation and dtype."""
    worst: dict[tuple[str, str], AccuracyRow] = {}
    for row in accuracy:
        before = worst.get((row.kernel, row.dtype))
        # A row without a number is the worst of all.
        if before is None or (not before.failure and (row.failure or row.error > before.error)):
            worst[row.kernel, row.dtype] = row
    rows = [
        (
            row.kernel,
            row.dtype,
            row.shape,
            "" if row.failure else f"{row.error:.1e}",
            "" if row.failure else f"{row.bound:.1e}",
            "ok" if row.is_ok else row.failure or "WRONG",
        )
        for row in worst.values()
    ]
    header = ("kernel", "dtype", "worst shape", "error", "bound", "")
    return "## Against the reference in float64\n\n" + table(header, rows, 3)


def _kernels(kernels: Sequence[TimingRow], chip: Chip) -> str:
    rows = [
        (
            row.kernel,
            row.shape,
            str(row.num_tokens),
            *(
                (
                    f"{row.seconds * 1e6:.1f}",
                    f"{row.num_bytes / row.seconds / 1e9:.0f}",
                    f"{100 * bandwidth_share(row, chip):.0f}",
                    f"{100 * compute_share(row, chip):.0f}",
                )
                if not row.failure
                else (row.failure, "", "", "")
            ),
        )
        for row in kernels
    ]
    header = ("kernel", "shape", "tokens", "µs", "GB/s", "% of copy", "% of matmul")
    note = (
        "Medians of calls launched from a CUDA graph, inputs rotated through more memory than the "
        "L2 cache holds. Shares are of the device's own copy and matrix product above."
    )
    return f"## Kernels\n\n{note}\n\n" + table(header, rows, 2)


def _attention(attention: Sequence[AttentionRow], chip: Chip) -> str:
    rows = [
        (
            row.phase,
            row.shape,
            str(row.batch),
            str(row.kv_len),
            *(
                (
                    f"{row.seconds * 1e6:.1f}",
                    f"{100 * share_of_limit(row, chip):.0f}",
                    f"{row.torch_seconds * 1e6:.1f}",
                    f"{speed_up(row.torch_seconds, row.seconds):.2f}",
                )
                if not row.failure
                else (row.failure, "", "", "")
            ),
        )
        for row in attention
    ]
    header = ("phase", "shape", "batch", "tokens", "µs", "% of limit", "torch µs", "times torch")
    note = (
        "torch is `scaled_dot_product_attention` on contiguous keys and values. The limit is the "
        "copy's bandwidth or the matrix product's rate, whichever is nearer."
    )
    return f"## Attention\n\n{note}\n\n" + table(header, rows, 2)


def _serving(serving: Sequence[ServingRow]) -> str:
    rows = [
        (
            str(row.num_requests),
            f"{row.input_len} + {row.output_len}",
            f"{row.graph_tokens_per_s:.0f}",
            f"{row.eager_tokens_per_s:.0f}",
            f"{row.graph_tokens_per_s / row.eager_tokens_per_s:.2f}",
            f"{row.num_equal} of {row.num_requests}",
        )
        for row in serving
    ]
    header = ("requests", "tokens", "graphs, tok/s", "eager, tok/s", "ratio", "same tokens")
    note = f"{serving[0].model.rpartition('/')[2]} in {serving[0].dtype}, all requests at once."
    return f"## A model\n\n{note}\n\n" + table(header, rows, 0)
