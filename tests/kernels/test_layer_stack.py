"""All layers in one call leave the bits that they leave one by one."""

import dataclasses
import threading
import time

import pytest
import torch
from torch import Tensor

from kernel_cases import PagedCase
from layer_cases import WIDTH, attention_weights, case_of, mlp_weights, random_rows, rope_of
from pageray.kernels import cpu, reference
from pageray.kernels.cpu import shared_reduce
from pageray.kernels.ops import LayerBlocks, NoProgress, Ops, RaggedBatch, RopeStep

CPU = torch.device("cpu")
NUM_LAYERS = 3
SLOT_BYTES = 4096


class CountedLayers:
    """A `LayerProgress` with a word of its own, and what Python was told."""

    def __init__(self) -> None:
        self._word = torch.tensor([-1])
        self.calls: list[int] = []

    def __call__(self, num_layers: int) -> None:
        self.calls.append(num_layers)

    def word(self) -> tuple[int, int]:
        return self._word.data_ptr(), 700

    @property
    def value(self) -> int:
        return int(self._word)


def layers_of(
    ops: Ops, rng: torch.Generator, dtype: torch.dtype, *, is_full: bool
) -> list[LayerBlocks]:
    return [
        (
            ops.pack_attention(attention_weights(rng, CPU, dtype, is_full=is_full)),
            ops.pack_mlp(mlp_weights(64, WIDTH, generator=rng, dtype=dtype, has_bias=is_full)),
        )
        for _ in range(NUM_LAYERS)
    ]


def pool_of(case: PagedCase, num_layers: int = NUM_LAYERS) -> Tensor:
    """The case's pages in every layer."""
    return torch.stack([case.layer] * num_layers, dim=1)


def one_by_one(
    layers: list[LayerBlocks], residual_TE: Tensor, pool: Tensor, rope: RopeStep, batch: RaggedBatch
) -> Tensor:
    x_TE = layers[0][0](None, residual_TE, pool[:, 0], rope, batch)
    for index in range(1, len(layers)):
        x_TE = layers[index - 1][1](x_TE, residual_TE)
        x_TE = layers[index][0](x_TE, residual_TE, pool[:, index], rope, batch)
    return x_TE


@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize(
    ("ops", "dtype"),
    [(cpu.OPS, torch.float32), (cpu.OPS, torch.bfloat16), (cpu.INT8_OPS, torch.float32)],
    ids=("float32", "bfloat16", "int8"),
)
def test_bits_are_those_of_the_blocks(
    rng: torch.Generator, ops: Ops, dtype: torch.dtype, is_full: bool
) -> None:
    case = case_of(rng, CPU, dtype)
    rope, residual_TE = rope_of(case), random_rows(rng, CPU, dtype)
    layers = layers_of(ops, rng, dtype, is_full=is_full)
    stack = ops.stack_layers(layers, None)
    assert stack is not None
    pool, residual = pool_of(case), residual_TE.clone()
    progress = CountedLayers()
    x_TE = stack(residual, pool, rope, dataclasses.replace(case.batch), progress)
    twin_pool, twin_residual = pool_of(case), residual_TE.clone()
    twin_TE = one_by_one(layers, twin_residual, twin_pool, rope, dataclasses.replace(case.batch))
    assert torch.equal(x_TE, twin_TE)
    assert torch.equal(residual, twin_residual)
    torch.testing.assert_close(pool, twin_pool, rtol=0, atol=0, equal_nan=True)
    assert progress.value == 700 + NUM_LAYERS


def test_layers_of_different_kinds_run_one_by_one(rng: torch.Generator) -> None:
    layers = layers_of(cpu.OPS, rng, torch.float32, is_full=False)
    other = layers_of(cpu.OPS, rng, torch.float32, is_full=True)
    assert cpu.OPS.stack_layers([*layers[:2], other[2]], None) is None
    # Weights that are bfloat16 numbers are kept as such: another kind.
    rounded = attention_weights(rng, CPU, torch.bfloat16, is_full=False)
    rounded = dataclasses.replace(
        rounded,
        **{name: getattr(rounded, name).float() for name in ("norm_E", "qkv_OE", "o_EO")},
    )
    narrow = (cpu.OPS.pack_attention(rounded), layers[0][1])
    assert cpu.OPS.stack_layers([layers[0], narrow], None) is None
    assert cpu.OPS.stack_layers([narrow, narrow], None) is not None
    foreign = layers_of(reference.OPS, rng, torch.float32, is_full=False)
    assert cpu.OPS.stack_layers(foreign, None) is None
    assert reference.OPS.stack_layers(foreign, None) is None


def test_a_pool_of_another_depth_is_refused(rng: torch.Generator) -> None:
    case = case_of(rng, CPU)
    stack = cpu.OPS.stack_layers(layers_of(cpu.OPS, rng, torch.float32, is_full=False), None)
    assert stack is not None
    pool = pool_of(case, 2)
    with pytest.raises(ValueError, match="pool has 2 layers, the model 3"):
        stack(random_rows(rng, CPU), pool, rope_of(case), case.batch, CountedLayers())


class TwoRanks:
    """`RankSums` of one of two ranks in this process."""

    def __init__(self, memory: Tensor, rank: int) -> None:
        self.operation = 0
        self.region = (memory.data_ptr(), 2, SLOT_BYTES, rank)
        self.num_waits = 0
        self.has_waited = threading.Event()

    def wait_for_others(self) -> None:
        self.num_waits += 1
        self.has_waited.set()
        while shared_reduce.wait_for_all(self.region[0], 2, self.operation) >= 0:
            time.sleep(0.001)


def test_ranks_sum_between_blocks_and_wait_for_the_late(rng: torch.Generator) -> None:
    """The slots are small, so that a sum takes several pieces, and one rank comes late."""
    case = case_of(rng, CPU)
    rope, residual_TE = rope_of(case), random_rows(rng, CPU)
    ranks = [layers_of(cpu.OPS, rng, torch.float32, is_full=False) for _ in range(2)]
    memory = torch.zeros(shared_reduce.region_bytes(2, SLOT_BYTES), dtype=torch.uint8)
    sums = [TwoRanks(memory, rank) for rank in range(2)]
    pools = [pool_of(case) for _ in range(2)]
    residuals = [residual_TE.clone() for _ in range(2)]
    outs: list[Tensor | None] = [None, None]

    def run(rank: int) -> None:
        stack = cpu.OPS.stack_layers(ranks[rank], sums[rank])
        assert stack is not None
        if rank == 1:
            sums[0].has_waited.wait(timeout=200)
        batch = dataclasses.replace(case.batch)
        outs[rank] = stack(residuals[rank], pools[rank], rope, batch, NoProgress())

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=200)
        assert not thread.is_alive()
    assert sums[0].num_waits > 0
    expected = summed_by_hand(ranks, case, rope, residual_TE.clone())
    for rank in range(2):
        out = outs[rank]
        assert out is not None
        assert torch.equal(out, expected[rank])


def summed_by_hand(
    ranks: list[list[LayerBlocks]], case: PagedCase, rope: RopeStep, residual_TE: Tensor
) -> list[Tensor]:
    """What each rank's last attention gives, with everything before it summed over both."""
    pools = [pool_of(case) for _ in ranks]
    x_TE: Tensor | None = None
    ys: list[Tensor] = []
    for index in range(NUM_LAYERS):
        residuals = [residual_TE.clone() for _ in ranks]
        ys = [
            layers[index][0](x_TE, residual, pool[:, index], rope, dataclasses.replace(case.batch))
            for layers, residual, pool in zip(ranks, residuals, pools, strict=True)
        ]
        residual_TE = residuals[0]
        if index + 1 < NUM_LAYERS:
            x_TE = ys[0] + ys[1]
            residuals = [residual_TE.clone() for _ in ranks]
            first, second = (
                layers[index][1](x_TE, residual)
                for layers, residual in zip(ranks, residuals, strict=True)
            )
            residual_TE, x_TE = residuals[0], first + second
    return ys
