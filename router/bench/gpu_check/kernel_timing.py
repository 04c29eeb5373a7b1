"""The time of every operation at every model's shapes, for a decode step and for a prefill."""

from collections.abc import Callable, Iterator

import torch

from pageray.router.bench.gpu_check.attempts import attempt
from pageray.router.bench.gpu_check.bench_device import BenchDevice
from pageray.router.bench.gpu_check.cases import LAYER_CASES, SAMPLING_CASES, dtypes, shapes
from pageray.router.bench.gpu_check.clock import median_call_s
from pageray.router.bench.gpu_check.findings import TimingRow
from pageray.router.bench.gpu_check.kernel_call import KernelCall, KernelCase, Setting
from pageray.router.bench.gpu_check.rotation import num_sets, one_round

_NUM_TOKENS = (64, 2048)
_NUM_ROWS = 64
_NUM_QUICK = 8


def time_kernels(bench: BenchDevice, on_row: Callable[[int], object]) -> list[TimingRow]:
    """A row for every operation and shape; `on_row(1)` after each."""
    rows: list[TimingRow] = []
    for case, setting in _plan(bench):
        rows.append(_time(case, setting, bench))
        on_row(1)
    return rows


def num_timings(is_quick: bool) -> int:
    per_shape = len(_token_counts(is_quick)) * len(LAYER_CASES) + len(SAMPLING_CASES)
    return len(shapes(is_quick)) * per_shape


@torch.inference_mode()
def timed(
    prepare: Callable[[Setting], KernelCall], setting: Setting, bench: BenchDevice
) -> tuple[float, KernelCall]:
    """Median seconds of one call, over as many sets of inputs as the cache calls for, and one of
    the calls."""
    calls = [prepare(setting)]
    for _ in range(num_sets(calls[0].num_bytes, bench.l2_bytes) - 1):
        calls.append(prepare(setting))
    work = one_round([lambda call=call: call.run(bench.ops) for call in calls])
    return median_call_s(bench.clock, work, len(calls), bench.num_rounds), calls[0]


def _token_counts(is_quick: bool) -> tuple[int, ...]:
    return (_NUM_QUICK,) if is_quick else _NUM_TOKENS


def _plan(bench: BenchDevice) -> Iterator[tuple[KernelCase, Setting]]:
    dtype = dtypes(bench.is_quick)[0]
    for shape in shapes(bench.is_quick):
        for num_tokens in _token_counts(bench.is_quick):
            for case in LAYER_CASES:
                yield case, bench.setting(shape, num_tokens, dtype)
        num_rows = _NUM_QUICK if bench.is_quick else _NUM_ROWS
        for case in SAMPLING_CASES:
            yield case, bench.setting(shape, num_rows, dtype)


def _time(case: KernelCase, setting: Setting, bench: BenchDevice) -> TimingRow:
    found = attempt(lambda: timed(case.prepare, setting, bench))
    seconds, call = (0.0, None) if isinstance(found, str) else found
    return TimingRow(
        kernel=case.name,
        shape=setting.shape.name,
        num_tokens=setting.num_tokens,
        seconds=seconds,
        num_bytes=call.num_bytes if call else 0,
        num_flops=call.num_flops if call else 0,
        failure=found if isinstance(found, str) else "",
    )
