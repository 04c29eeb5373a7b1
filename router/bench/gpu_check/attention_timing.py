"""Paged attention at the lengths that matter, beside torch's own attention."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from pageray.kernels.gpu.model_launches import ModelShape
from pageray.router.bench.gpu_check.attempts import attempt
from pageray.router.bench.gpu_check.attention_cases import (
    attention_call,
    torch_attention_call,
)
from pageray.router.bench.gpu_check.bench_device import BenchDevice
from pageray.router.bench.gpu_check.cases import dtypes, shapes
from pageray.router.bench.gpu_check.findings import AttentionRow
from pageray.router.bench.gpu_check.kernel_call import KernelCall, Setting
from pageray.router.bench.gpu_check.kernel_timing import timed
from pageray.router.bench.gpu_check.rotation import num_sets

_DECODES = tuple((batch, kv_len) for batch in (1, 16, 64, 256) for kv_len in (1024, 8192))
_PREFILLS = (2048, 8192)
_QUICK_DECODES = ((2, 40),)
_QUICK_PREFILLS = (32,)
_POOL_SHARE = 4
"""The pools of all sets together take at most one over so much of the device's memory."""


@dataclass(frozen=True, kw_only=True)
class _Point:
    phase: Literal["decode", "prefill"]
    shape: ModelShape
    batch: int
    kv_len: int

    @property
    def num_queries(self) -> int:
        return 1 if self.phase == "decode" else self.kv_len


def time_attention(bench: BenchDevice, on_row: Callable[[int], object]) -> list[AttentionRow]:
    """A row for every shape and length; `on_row(1)` after each."""
    rows: list[AttentionRow] = []
    for point in points(bench.is_quick):
        rows.append(_time(point, bench))
        on_row(1)
    return rows


def points(is_quick: bool) -> Iterator[_Point]:
    """Without windows: torch's attention has none without a mask."""
    decodes, prefills = (_QUICK_DECODES, _QUICK_PREFILLS) if is_quick else (_DECODES, _PREFILLS)
    for known in shapes(is_quick):
        shape = dataclasses.replace(known, window=0)
        for batch, kv_len in decodes:
            yield _Point(phase="decode", shape=shape, batch=batch, kv_len=kv_len)
        for kv_len in prefills:
            yield _Point(phase="prefill", shape=shape, batch=1, kv_len=kv_len)


def pool_layers(shape: ModelShape, layer_bytes: int, l2_bytes: int, memory_bytes: int) -> int:
    """How many layers the pools may have, at most the model's: neighbouring pages of one layer
    are then as far apart as when a model runs, if memory allows it."""
    budget = memory_bytes // _POOL_SHARE // num_sets(layer_bytes, l2_bytes)
    return max(1, min(shape.num_layers, budget // layer_bytes))


def _time(point: _Point, bench: BenchDevice) -> AttentionRow:
    found = attempt(lambda: _measure(point, bench))
    ours, theirs, call = (0.0, 0.0, None) if isinstance(found, str) else found
    return AttentionRow(
        phase=point.phase,
        shape=point.shape.name,
        batch=point.batch,
        kv_len=point.kv_len,
        seconds=ours,
        torch_seconds=theirs,
        num_bytes=call.num_bytes if call else 0,
        num_flops=call.num_flops if call else 0,
        failure=found if isinstance(found, str) else "",
    )


def _measure(point: _Point, bench: BenchDevice) -> tuple[float, float, KernelCall]:
    """Seconds of our call and of torch's, and our call."""
    shape, dtype = point.shape, dtypes(bench.is_quick)[0]
    tokens = point.batch * point.kv_len
    layer_bytes = 2 * tokens * shape.num_kv_heads * shape.head_dim * dtype.itemsize
    layers = pool_layers(shape, layer_bytes, bench.l2_bytes, bench.memory_bytes)
    lengths = [(point.kv_len, point.num_queries)] * point.batch

    def ours(setting: Setting) -> KernelCall:
        return attention_call(setting, lengths, layers)

    theirs = functools.partial(
        torch_attention_call, kv_len=point.kv_len, num_queries=point.num_queries
    )
    setting = bench.setting(shape, point.batch, dtype)
    our_seconds, call = timed(ours, setting, bench)
    their_seconds, _ = timed(theirs, setting, bench)
    return our_seconds, their_seconds, dataclasses.replace(call, tensors={})
