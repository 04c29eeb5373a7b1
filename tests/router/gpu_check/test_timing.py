"""What timing rests on, without a GPU: rotation, medians, counted work, shares."""

from collections.abc import Callable

import pytest
import torch

from pageray.kernels.gpu.model_launches import LLAMA_3_8B
from pageray.router.bench.gpu_check.attention_cases import attention_call, visible_keys
from pageray.router.bench.gpu_check.attention_timing import pool_layers
from pageray.router.bench.gpu_check.bench_device import BenchDevice
from pageray.router.bench.gpu_check.cases import TINY
from pageray.router.bench.gpu_check.clock import median_call_s
from pageray.router.bench.gpu_check.figures import bandwidth_share, compute_share, share_of_limit
from pageray.router.bench.gpu_check.findings import Chip, TimingRow
from pageray.router.bench.gpu_check.rotation import MAX_SETS, num_sets, one_round

MIB = 1 << 20


@pytest.mark.parametrize(
    ("set_bytes", "sets"),
    [(1, MAX_SETS), (8 * MIB, 25), (9 * MIB, 23), (50 * MIB, 4), (200 * MIB, 1), (999 * MIB, 1)],
)
def test_rotated_inputs_are_four_times_the_cache(set_bytes: int, sets: int) -> None:
    assert num_sets(set_bytes, l2_bytes=50 * MIB) == sets
    assert set_bytes == 1 or sets * set_bytes >= 200 * MIB


def test_a_round_makes_every_call_once_in_order() -> None:
    made: list[int] = []
    one_round([lambda number=number: made.append(number) for number in range(4)])()
    assert made == [0, 1, 2, 3]


def test_the_median_round_is_shared_out_over_its_calls() -> None:
    class Scripted:
        def rounds_s(self, work: Callable[[], None], num_rounds: int) -> list[float]:
            return [9.0, 1.0, 4.0][:num_rounds]

    assert median_call_s(Scripted(), lambda: None, num_calls=8, num_rounds=3) == 0.5


@pytest.mark.parametrize("window", [0, 1, 4, 30])
@pytest.mark.parametrize(("kv_len", "num_queries"), [(1, 1), (9, 1), (9, 9), (20, 7)])
def test_visible_keys_are_those_of_the_mask(kv_len: int, num_queries: int, window: int) -> None:
    pairs = {
        (query, key)
        for query in range(kv_len - num_queries, kv_len)
        for key in range(query + 1)
        if window == 0 or key > query - window
    }
    expected = len({key for _, key in pairs}), len(pairs)
    assert visible_keys(kv_len, num_queries, window) == expected


def test_attention_counts_each_key_once_and_each_product() -> None:
    bench = BenchDevice.of(torch.device("cpu"), is_quick=True)
    call = attention_call(bench.setting(TINY, 2, torch.float32), [(10, 1), (7, 7)])
    num_heads, num_kv_heads, head_dim = 4, 2, 16
    queries_and_outputs = 2 * 8 * num_heads * head_dim
    keys_and_values = 2 * 17 * num_kv_heads * head_dim
    assert call.num_bytes == 4 * (queries_and_outputs + keys_and_values)
    assert call.num_flops == 4 * num_heads * head_dim * (10 + 28)


def test_pools_take_as_many_layers_as_a_quarter_of_the_memory_holds() -> None:
    layer = 4 * MIB
    assert num_sets(layer, 50 * MIB) == 50
    assert pool_layers(LLAMA_3_8B, layer, 50 * MIB, 80_000 * MIB) == 32
    assert pool_layers(LLAMA_3_8B, layer, 50 * MIB, 4_000 * MIB) == 5
    assert pool_layers(LLAMA_3_8B, 8192 * MIB, 50 * MIB, 16_000 * MIB) == 1


def test_shares_are_of_the_limits_measured_in_the_same_run() -> None:
    chip = Chip(
        name="x",
        driver="",
        cuda="",
        torch="",
        triton="",
        memory_bytes=1,
        l2_bytes=1,
        copy_bytes_per_s=2e12,
        matmul_flop_per_s=8e14,
        matmul_dtype="bfloat16",
    )
    row = TimingRow(
        kernel="k", shape="s", num_tokens=1, seconds=1e-3, num_bytes=10**9, num_flops=2 * 10**11
    )
    assert bandwidth_share(row, chip) == pytest.approx(0.5)
    assert compute_share(row, chip) == pytest.approx(0.25)
    assert share_of_limit(row, chip) == pytest.approx(0.5)
