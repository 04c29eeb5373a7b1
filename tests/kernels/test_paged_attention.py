import dataclasses

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernel_cases import PagedCase, PagedShape, assert_near, paged_case
from pageray.kernels import reference
from pageray.kernels.ops import Ops

# Decodes, chunks and whole prompts in one call; lengths on both sides of block boundaries.
MIXED = ((1, 1), (15, 1), (16, 1), (17, 17), (32, 3), (33, 1), (48, 47))


def attend(ops: Ops, case: PagedCase) -> Tensor:
    return ops.paged_attention(case.q_THD, case.layer, case.batch, case.options)


def check(ops: Ops, case: PagedCase) -> None:
    out = attend(ops, case)
    assert out.dtype == case.q_THD.dtype
    assert_near(out, attend(reference.OPS, case))


@pytest.mark.parametrize("window", [0, 5])
def test_reference_equals_torch_attention_with_a_mask(rng: torch.Generator, window: int) -> None:
    """One sequence whose pages happen to be in order, against torch's own operation."""
    case = paged_case(
        PagedShape(sequences=[(37, 21)], num_heads=6, num_kv_heads=2, window=window), generator=rng
    )
    pages_N2KPD = case.layer[case.batch.block_tables_SN[0, :3].long()]
    k_KJD, v_KJD = pages_N2KPD.permute(1, 2, 0, 3, 4).reshape(2, 2, 48, 32)[:, :, :37]
    queries, keys = torch.arange(16, 37).unsqueeze(1), torch.arange(37).unsqueeze(0)
    mask = (keys <= queries) & ((keys > queries - window) | (window == 0))
    expected_HID = functional.scaled_dot_product_attention(
        case.q_THD.transpose(0, 1),
        k_KJD.repeat_interleave(3, dim=0),
        v_KJD.repeat_interleave(3, dim=0),
        attn_mask=mask,
        scale=case.options.scale,
    )
    assert_near(attend(reference.OPS, case), expected_HID.transpose(0, 1))


def test_mixed_batch(
    ops: Ops, device: torch.device, dtype: torch.dtype, rng: torch.Generator
) -> None:
    check(ops, paged_case(PagedShape(sequences=MIXED), generator=rng, dtype=dtype, device=device))


@pytest.mark.parametrize("window", [1, 7, 16, 1000])
def test_sliding_window(ops: Ops, device: torch.device, rng: torch.Generator, window: int) -> None:
    shape = PagedShape(sequences=((40, 1), (33, 20), (5, 5)), window=window)
    check(ops, paged_case(shape, generator=rng, device=device))


@pytest.mark.parametrize("group", [1, 3, 4, 7, 8])
def test_query_heads_per_kv_head(
    ops: Ops, device: torch.device, rng: torch.Generator, group: int
) -> None:
    shape = PagedShape(
        sequences=((19, 1), (9, 5)), num_heads=2 * group, num_kv_heads=2, block_size=8
    )
    check(ops, paged_case(shape, generator=rng, device=device))


@pytest.mark.parametrize("block_size", [1, 2, 7, 16, 32, 64, 128])
def test_block_sizes(ops: Ops, device: torch.device, rng: torch.Generator, block_size: int) -> None:
    shape = PagedShape(
        sequences=((21, 1), (13, 4)), num_heads=2, num_kv_heads=1, block_size=block_size
    )
    check(ops, paged_case(shape, generator=rng, device=device))


@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 192, 256])
def test_head_dims(ops: Ops, device: torch.device, rng: torch.Generator, head_dim: int) -> None:
    shape = PagedShape(
        sequences=((18, 1), (9, 3)), num_heads=3, num_kv_heads=1, head_dim=head_dim, block_size=8
    )
    check(ops, paged_case(shape, generator=rng, device=device))


@pytest.mark.parametrize("queries", ["decode", "prompt"])
def test_every_length_around_block_boundaries(
    ops: Ops, device: torch.device, rng: torch.Generator, queries: str
) -> None:
    lengths = range(1, 14)
    shape = PagedShape(
        sequences=[(n, 1 if queries == "decode" else n) for n in lengths],
        num_heads=2,
        num_kv_heads=1,
        block_size=4,
    )
    check(ops, paged_case(shape, generator=rng, device=device))


def test_a_prompt_of_many_query_tiles(ops: Ops, device: torch.device, rng: torch.Generator) -> None:
    shape = PagedShape(sequences=((150, 150), (130, 70)), num_heads=4, num_kv_heads=2)
    check(ops, paged_case(shape, generator=rng, device=device))


@pytest.mark.parametrize("window", [0, 900])
def test_a_decode_long_enough_to_be_split(
    ops: Ops, device: torch.device, rng: torch.Generator, window: int
) -> None:
    shape = PagedShape(
        sequences=((1500, 1), (700, 3), (20, 1)), num_heads=3, num_kv_heads=1, window=window
    )
    check(ops, paged_case(shape, generator=rng, device=device))


def test_a_sequence_without_queries_is_skipped(
    ops: Ops, device: torch.device, rng: torch.Generator
) -> None:
    shape = PagedShape(sequences=((5, 2), (9, 0), (6, 1)), num_heads=2, num_kv_heads=1)
    check(ops, paged_case(shape, generator=rng, device=device))


@pytest.mark.parametrize("window", [0, 6])
def test_what_unused_memory_holds_changes_no_bit(
    ops: Ops, device: torch.device, dtype: torch.dtype, window: int
) -> None:
    shape = PagedShape(sequences=((17, 1), (33, 1), (30, 13)), window=window)
    outs: list[Tensor] = []
    for garbage in (0.0, torch.nan):
        generator = torch.Generator().manual_seed(1)
        case = paged_case(shape, generator=generator, dtype=dtype, device=device, garbage=garbage)
        outs.append(attend(ops, case))
    assert torch.equal(*outs)
    assert outs[0].isfinite().all()


def test_pages_below_the_window_may_belong_to_others(
    ops: Ops, device: torch.device, rng: torch.Generator
) -> None:
    """A query at position 39 with a window of 8 sees tokens 32 .. 39: blocks 0 and 1 are free."""
    case = paged_case(PagedShape(sequences=((40, 1),), window=8), generator=rng, device=device)
    expected = attend(ops, case)
    case.pool[case.batch.block_tables_SN[0, :2].long()] = torch.nan
    assert torch.equal(attend(ops, case), expected)


def test_a_sequence_does_not_depend_on_its_neighbours(
    ops: Ops, device: torch.device, rng: torch.Generator
) -> None:
    case = paged_case(PagedShape(sequences=MIXED), generator=rng, device=device)
    out = attend(ops, case)
    starts = case.batch.query_starts_S1
    for s in (2, 4):
        first, end = int(starts[s]), int(starts[s + 1])
        alone = dataclasses.replace(
            case.batch,
            query_starts_S1=torch.tensor([0, end - first], dtype=torch.int32, device=device),
            kv_lens_S=case.batch.kv_lens_S[s : s + 1],
            block_tables_SN=case.batch.block_tables_SN[s : s + 1],
        )
        one = dataclasses.replace(case, q_THD=case.q_THD[first:end], batch=alone)
        assert_near(attend(ops, one), out[first:end])


def test_large_scores_do_not_overflow(ops: Ops, device: torch.device, rng: torch.Generator) -> None:
    case = paged_case(PagedShape(sequences=((30, 4),)), generator=rng, device=device)
    case = dataclasses.replace(case, q_THD=case.q_THD * 1e3)
    assert attend(ops, case).isfinite().all()
    check(ops, case)


def test_a_nan_query_spoils_its_own_head_only(
    ops: Ops, device: torch.device, rng: torch.Generator
) -> None:
    case = paged_case(PagedShape(sequences=((30, 5),)), generator=rng, device=device)
    expected = attend(ops, case)
    case.q_THD[2, 1, 0] = torch.nan
    out = attend(ops, case)
    assert out[2, 1].isnan().all()
    out[2, 1] = expected[2, 1]
    assert_near(out, expected)


def test_queries_inside_a_wider_row(ops: Ops, device: torch.device, rng: torch.Generator) -> None:
    case = paged_case(PagedShape(sequences=((20, 6),)), generator=rng, device=device)
    qkv = torch.zeros(6, 10, 32, device=device)
    qkv[:, :6] = case.q_THD
    strided = dataclasses.replace(case, q_THD=qkv[:, :6])
    assert torch.equal(attend(ops, strided), attend(ops, case))


def with_shared_blocks(case: PagedCase, members: list[int], num_tokens: int) -> None:
    """Let the sequences begin with the same `num_tokens // block size` blocks."""
    tables_SN = case.batch.block_tables_SN
    num_blocks = num_tokens // case.layer.shape[3]
    tables_SN[members, :num_blocks] = tables_SN[members[0], :num_blocks]


# Groups that end with a block, inside a split or past one; more members than fit a tile; others
# between them; a beginning too short to share.
@pytest.mark.parametrize(
    ("kv_lens", "groups"),
    [
        ((97, 130, 200, 96), {80: [0, 1, 2]}),
        ((1100, 1031, 40, 600), {1024: [0, 1]}),
        ((80,) * 35, {64: list(range(35))}),
        ((90, 70, 91, 71, 92, 72), {80: [0, 2, 4], 64: [1, 3, 5]}),
        ((40, 41), {32: [0, 1]}),
        ((64, 64), {64: [0, 1]}),
    ],
)
def test_sequences_that_share_blocks(
    ops: Ops,
    device: torch.device,
    rng: torch.Generator,
    kv_lens: tuple[int, ...],
    groups: dict[int, list[int]],
) -> None:
    if ops.name == "gpu" and device.type == "cpu" and max(kv_lens) > 600:
        pytest.skip("too slow in Triton's interpreter")
    shape = PagedShape(
        sequences=((5, 5), *((length, 1) for length in kv_lens)), num_heads=3, num_kv_heads=1
    )
    case = paged_case(shape, generator=rng, device=device)
    for num_tokens, members in groups.items():
        with_shared_blocks(case, [member + 1 for member in members], num_tokens)
    check(ops, case)


def test_shared_blocks_are_read_once(rng: torch.Generator) -> None:
    from pageray.kernels.cpu.attention_plan import FIRST_KEY, NUM_QUERIES, plan_attention

    case = paged_case(PagedShape(sequences=((100, 1), (120, 1), (99, 1))), generator=rng)
    with_shared_blocks(case, [0, 1, 2], 96)
    plan = plan_attention(case.batch, 3, 0, 16, case.layer.shape[0])
    reads_of_first_block = [item for item in plan.items if item[FIRST_KEY] == 0]
    assert [item[NUM_QUERIES] for item in reads_of_first_block] == [3]


def test_threads_compute_what_one_thread_does(rng: torch.Generator) -> None:
    from pageray.kernels import cpu

    shape = PagedShape(sequences=((700, 1), (90, 90), (300, 40)), num_heads=9, num_kv_heads=3)
    case = paged_case(shape, generator=rng)
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = attend(cpu.OPS, case)
        torch.set_num_threads(2)
        assert torch.equal(attend(cpu.OPS, case), expected)
    finally:
        torch.set_num_threads(num_threads)


@pytest.mark.parametrize("bad_block", [-1, 10**6])
def test_a_block_outside_the_pool_is_refused(rng: torch.Generator, bad_block: int) -> None:
    from pageray.kernels import cpu

    case = paged_case(PagedShape(sequences=((5, 1), (20, 1))), generator=rng)
    case.batch.block_tables_SN[1, 1] = bad_block
    with pytest.raises(ValueError, match="sequence 1 of the batch"):
        attend(cpu.OPS, case)


def test_numbers_of_heads_that_do_not_divide_are_refused(
    ops: Ops, device: torch.device, rng: torch.Generator
) -> None:
    case = paged_case(PagedShape(sequences=((5, 1),)), generator=rng, device=device)
    with pytest.raises(ValueError, match="5"):
        attend(ops, dataclasses.replace(case, q_THD=case.q_THD[:, :5].contiguous()))
