"""Every operation against `kernels/reference` in float64 on the same inputs."""

import math
from collections.abc import Callable, Iterator

import torch

from pageray.kernels.dispatch import ops_for
from pageray.router.bench.gpu_check.attempts import attempt
from pageray.router.bench.gpu_check.bench_device import BenchDevice
from pageray.router.bench.gpu_check.bounds import bound_of, largest_error
from pageray.router.bench.gpu_check.cases import LAYER_CASES, SAMPLING_CASES, dtypes, shapes
from pageray.router.bench.gpu_check.findings import AccuracyRow
from pageray.router.bench.gpu_check.kernel_call import KernelCase, Setting

_NUM_TOKENS = 96
_NUM_ROWS = 24
_NUM_QUICK_TOKENS = 12


def check_accuracy(bench: BenchDevice, on_row: Callable[[int], object]) -> list[AccuracyRow]:
    """A row for every operation, shape and dtype; `on_row(1)` after each."""
    rows: list[AccuracyRow] = []
    for case, setting in _plan(bench):
        rows.append(_check(case, setting, bench))
        on_row(1)
    return rows


def num_checks(is_quick: bool) -> int:
    layers = len(LAYER_CASES) * len(dtypes(is_quick))
    return len(shapes(is_quick)) * (layers + len(SAMPLING_CASES))


def _plan(bench: BenchDevice) -> Iterator[tuple[KernelCase, Setting]]:
    num_tokens, num_rows = _NUM_TOKENS, _NUM_ROWS
    if bench.is_quick:
        num_tokens = num_rows = _NUM_QUICK_TOKENS

    for shape in shapes(bench.is_quick):
        for dtype in dtypes(bench.is_quick):
            for case in LAYER_CASES:
                yield case, bench.setting(shape, num_tokens, dtype)
        for case in SAMPLING_CASES:
            yield case, bench.setting(shape, num_rows, torch.float32)


@torch.inference_mode()
def _check(case: KernelCase, setting: Setting, bench: BenchDevice) -> AccuracyRow:
    found = attempt(lambda: _error_and_bound(case, setting, bench))
    error, bound = (0.0, 0.0) if isinstance(found, str) else found
    return AccuracyRow(
        kernel=case.name,
        shape=setting.shape.name,
        dtype=str(setting.dtype).removeprefix("torch."),
        error=error,
        bound=bound,
        failure=found if isinstance(found, str) else "",
    )


def _error_and_bound(case: KernelCase, setting: Setting, bench: BenchDevice) -> tuple[float, float]:
    call = case.prepare(setting)
    outputs = call.run_on_copies(bench.ops)
    expected = call.run_in_float64(ops_for("reference"))
    error = largest_error(outputs, expected)
    if not math.isfinite(error):
        raise ValueError("not a number where the reference has one, or the other way round")
    return error, bound_of(outputs)
