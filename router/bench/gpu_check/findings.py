"""What the check found, as plain data that goes into the JSON file and between processes.

Times are in seconds, sizes in bytes; what is derived from them (rates, shares) is in `report.py`.
"""

from typing import Literal

import msgspec

StageName = Literal["tests", "chip", "accuracy", "kernels", "attention", "serving"]
Status = Literal["ok", "failed", "skipped"]


class Chip(msgspec.Struct, frozen=True, kw_only=True):
    """The device, what drives it, and what it was measured to do at best."""

    name: str
    driver: str
    cuda: str
    torch: str
    triton: str
    memory_bytes: int
    l2_bytes: int
    copy_bytes_per_s: float
    """Bytes read and written by a copy inside the device's memory."""
    matmul_flop_per_s: float
    """Of a square matrix product in `matmul_dtype`."""
    matmul_dtype: str


class AccuracyRow(msgspec.Struct, frozen=True, kw_only=True):
    """The largest error of one operation against the reference in float64."""

    kernel: str
    shape: str
    dtype: str
    error: float
    """As `bounds.largest_error`."""
    bound: float
    failure: str = ""
    """Why there is no number; the others are 0 then, as in the rows below."""

    @property
    def is_ok(self) -> bool:
        return not self.failure and self.error <= self.bound


class TimingRow(msgspec.Struct, frozen=True, kw_only=True):
    """The median time of one call, launched from a CUDA graph, inputs not in the L2 cache."""

    kernel: str
    shape: str
    num_tokens: int
    seconds: float
    num_bytes: int
    num_flops: int
    failure: str = ""


class AttentionRow(msgspec.Struct, frozen=True, kw_only=True):
    """Paged attention beside torch's on contiguous keys and values, the same work."""

    phase: Literal["decode", "prefill"]
    shape: str
    batch: int
    kv_len: int
    seconds: float
    torch_seconds: float
    num_bytes: int
    num_flops: int
    failure: str = ""


class ServingRow(msgspec.Struct, frozen=True, kw_only=True):
    """An engine under one load, greedy, with CUDA graphs and without."""

    model: str
    dtype: str
    num_requests: int
    input_len: int
    output_len: int
    graph_tokens_per_s: float
    eager_tokens_per_s: float
    num_equal: int
    """Requests that got the same tokens from both."""


class StageOutcome(msgspec.Struct, frozen=True, kw_only=True):
    name: StageName
    status: Status
    elapsed_s: float
    message: str = ""
    """Why it failed or was skipped; the tail of what it printed."""


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """A stage fills its own part; the report has all of them."""

    chip: Chip | None = None
    accuracy: tuple[AccuracyRow, ...] = ()
    kernels: tuple[TimingRow, ...] = ()
    attention: tuple[AttentionRow, ...] = ()
    serving: tuple[ServingRow, ...] = ()
    stages: tuple[StageOutcome, ...] = ()

    @property
    def problems(self) -> list[str]:
        """One line for each row that is wrong or could not be had."""
        lines = [
            f"{row.kernel} at {row.shape} in {row.dtype}: "
            + (row.failure or f"error {row.error:.2e}, bound {row.bound:.2e}")
            for row in self.accuracy
            if not row.is_ok
        ]
        lines += [
            f"{row.kernel} at {row.shape}, {row.num_tokens} tokens: {row.failure}"
            for row in self.kernels
            if row.failure
        ]
        lines += [
            f"{row.phase} at {row.shape}, {row.batch} x {row.kv_len}: {row.failure}"
            for row in self.attention
            if row.failure
        ]
        return lines


def merge(parts: list[Findings], stages: tuple[StageOutcome, ...]) -> Findings:
    """All parts as one; of each field the rows of every part, in order."""
    return Findings(
        chip=next((part.chip for part in parts if part.chip is not None), None),
        accuracy=tuple(row for part in parts for row in part.accuracy),
        kernels=tuple(row for part in parts for row in part.kernels),
        attention=tuple(row for part in parts for row in part.attention),
        serving=tuple(row for part in parts for row in part.serving),
        stages=stages,
    )
