import dataclasses

import pytest
import torch
from torch import Tensor

from pageray.kernels.dispatch import ops_for
from pageray.kernels.ops import Ops
from pageray.router.bench.gpu_check.accuracy import check_accuracy, num_checks
from pageray.router.bench.gpu_check.bench_device import BenchDevice
from pageray.router.bench.gpu_check.cases import LAYER_CASES, SAMPLING_CASES
from pageray.router.bench.gpu_check.findings import AccuracyRow

OTHER_NAMES = {"pack_linear": "linear", "pack_mlp": "mlp"}


@pytest.fixture
def bench() -> BenchDevice:
    return BenchDevice.of(torch.device("cpu"), is_quick=True)


def check(bench: BenchDevice, ops: Ops) -> dict[str, AccuracyRow]:
    counted: list[int] = []
    rows = check_accuracy(dataclasses.replace(bench, ops=ops), counted.append)
    assert len(rows) == len(counted) == num_checks(is_quick=True)
    return {row.kernel: row for row in rows}


def test_every_operation_has_a_case() -> None:
    # On a GPU the attention block is composed of operations that have cases of their own, and layers
    # are not joined.
    operations = {field.name for field in dataclasses.fields(Ops)} - {
        "name",
        "pack_attention",
        "stack_layers",
    }
    cases = {case.name for case in (*LAYER_CASES, *SAMPLING_CASES)}
    assert {OTHER_NAMES.get(name, name) for name in operations} == cases


def test_the_cpu_kernels_are_right(bench: BenchDevice) -> None:
    rows = check(bench, ops_for("cpu"))
    assert [row for row in rows.values() if not row.is_ok] == []
    assert all(row.error > 0 for row in rows.values() if row.kernel in {"linear", "rms_norm"})


def test_a_small_fault_is_found_in_its_kernel_alone(bench: BenchDevice) -> None:
    good = ops_for("cpu")

    def silu_mul(gate_up_T2I: Tensor) -> Tensor:
        out = good.silu_mul(gate_up_T2I)
        out[-1, -1] += 1e-3
        return out

    def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        raise RuntimeError("no such thing\nsecond line")

    def sample(logits_RV: Tensor, rows: object) -> Tensor:
        return good.sample(logits_RV, rows) * 0  # pyright: ignore[reportArgumentType]

    rows = check(
        bench, dataclasses.replace(good, silu_mul=silu_mul, rms_norm=rms_norm, sample=sample)
    )
    assert {row.kernel for row in rows.values() if not row.is_ok} == {
        "silu_mul",
        "rms_norm",
        "sample",
    }
    assert rows["rms_norm"].failure == "RuntimeError: no such thing"


def test_nan_is_a_failure(bench: BenchDevice) -> None:
    def silu_mul(gate_up_T2I: Tensor) -> Tensor:
        return torch.full_like(gate_up_T2I[:, ::2], torch.nan)

    row = check(bench, dataclasses.replace(ops_for("cpu"), silu_mul=silu_mul))["silu_mul"]
    assert not row.is_ok
    assert "not a number" in row.failure
