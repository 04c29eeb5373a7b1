"""Attention on matrix registers against the reference, and beside the path without them."""

import dataclasses

import pytest
import torch
from torch import Tensor

from kernel_cases import PagedCase, PagedShape, assert_near, paged_case
from pageray.kernels import cpu, reference
from pageray.kernels.cpu.matrix_tile import HAS_MATRIX_REGISTERS

pytestmark = pytest.mark.skipif(
    not HAS_MATRIX_REGISTERS, reason="this processor has no matrix registers"
)


def check(case: PagedCase, tolerance: float = 0.02) -> Tensor:
    """In bfloat16 pages, with queries of float32: what is left is the products' own rounding."""
    out = cpu.OPS.paged_attention(case.q_THD, case.layer, case.batch, case.options)
    exact = reference.OPS.paged_attention(case.q_THD, case.layer.float(), case.batch, case.options)
    # Queries and weights are rounded to 8 bits: an error of 2^-9 each, times a few values.
    assert (out - exact).abs().max() < tolerance
    return out


def case_of(rng: torch.Generator, shape: PagedShape) -> PagedCase:
    return paged_case(dataclasses.replace(shape, kv_dtype=torch.bfloat16), generator=rng)


@pytest.mark.parametrize("block_size", [1, 7, 16, 32, 48, 128])
@pytest.mark.parametrize("window", [0, 1, 50, 300])
def test_chunks_over_many_tiles(rng: torch.Generator, block_size: int, window: int) -> None:
    sequences = ((17, 17), (255, 2), (256, 40), (257, 257), (600, 75), (300, 1))
    shape = PagedShape(
        sequences=sequences, num_heads=6, num_kv_heads=2, block_size=block_size, window=window
    )
    check(case_of(rng, shape))


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 3, 8])
def test_head_dims_and_groups(rng: torch.Generator, head_dim: int, group: int) -> None:
    shape = PagedShape(
        sequences=((33, 1), (31, 9), (16, 16), (70, 40)),
        num_heads=2 * group,
        num_kv_heads=2,
        head_dim=head_dim,
    )
    check(case_of(rng, shape))


def test_decodes_that_are_split_and_shared(rng: torch.Generator) -> None:
    shape = PagedShape(sequences=((1500, 1), (1500, 1), (40, 1)), num_heads=3, num_kv_heads=1)
    case = case_of(rng, shape)
    case.batch.block_tables_SN[1, :80] = case.batch.block_tables_SN[0, :80]
    check(case)


def test_sinks_join_sums_of_the_registers(rng: torch.Generator) -> None:
    shape = PagedShape(sequences=((40, 30), (700, 1)), num_heads=3, num_kv_heads=1, has_sinks=True)
    check(case_of(rng, shape))


def test_the_chunking_changes_no_bit(rng: torch.Generator) -> None:
    """Tiles of keys begin at fixed places, and no query's column depends on another's."""
    whole = case_of(rng, PagedShape(sequences=((600, 600),), num_heads=6, num_kv_heads=2))
    out = check(whole)
    for first, end in ((0, 100), (100, 333), (333, 600)):
        batch = dataclasses.replace(
            whole.batch,
            query_starts_S1=torch.tensor([0, end - first], dtype=torch.int32),
            kv_lens_S=torch.tensor([end], dtype=torch.int32),
        )
        part = cpu.OPS.paged_attention(whole.q_THD[first:end], whole.layer, batch, whole.options)
        assert torch.equal(part, out[first:end])


def test_scores_that_grow_from_tile_to_tile(rng: torch.Generator) -> None:
    """References move, by less and by more than the slack, and so do the sums so far."""
    case = case_of(rng, PagedShape(sequences=((1024, 20),), num_heads=2, num_kv_heads=1))
    for step, gain in enumerate((0.1, 0.5, 3.0, 8.0)):
        blocks = case.batch.block_tables_SN[0, 16 * step : 16 * (step + 1)].long()
        case.pool[blocks, 1, 0] *= gain
    # An error of 2^-9 of scores up to 25 is one of a twentieth of their weights.
    check(case, tolerance=0.05)


def test_scores_far_below_the_largest_count_as_none(rng: torch.Generator) -> None:
    case = case_of(rng, PagedShape(sequences=((300, 20),), num_heads=2, num_kv_heads=1))
    case = dataclasses.replace(case, q_THD=case.q_THD * 300)
    out = cpu.OPS.paged_attention(case.q_THD, case.layer, case.batch, case.options)
    rounded_THD = case.q_THD.bfloat16().float()
    exact = reference.OPS.paged_attention(rounded_THD, case.layer.float(), case.batch, case.options)
    assert out.isfinite().all()
    # Nearly all of the weight is on one key, whichever it is after rounding.
    assert (out - exact).abs().mean() < 0.1


def test_unused_slots_may_hold_nan(rng: torch.Generator) -> None:
    outs: list[Tensor] = []
    for garbage in (0.0, torch.nan):
        generator = torch.Generator().manual_seed(2)
        shape = PagedShape(
            sequences=((17, 2), (33, 9), (300, 40)), kv_dtype=torch.bfloat16, block_size=48
        )
        case = paged_case(shape, generator=generator, garbage=garbage)
        outs.append(cpu.OPS.paged_attention(case.q_THD, case.layer, case.batch, case.options))
    assert torch.equal(*outs)
    assert outs[0].isfinite().all()


def test_a_nan_stays_in_its_row(rng: torch.Generator) -> None:
    case = case_of(rng, PagedShape(sequences=((300, 40),)))
    expected = check(case)
    case.q_THD[7, 1, 0] = torch.nan
    out = cpu.OPS.paged_attention(case.q_THD, case.layer, case.batch, case.options)
    assert out[7, 1].isnan().all()
    out[7, 1] = expected[7, 1]
    assert_near(out, expected)
