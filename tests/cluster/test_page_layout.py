"""Page layouts: which heads of which source rank fill which destination rank."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pageray.cluster.head_partition import partition_heads
from pageray.cluster.page_layout import HeadSlice, PoolLayout, head_slices

NUM_Q_HEADS, NUM_KV_HEADS = 9, 3


def layout_of(
    shards: tuple[tuple[int, int], ...],
    num_layers: int = 30,
    block_size: int = 16,
    head_dim: int = 64,
    element_bytes: int = 2,
) -> PoolLayout:
    return PoolLayout(
        num_layers=num_layers,
        block_size=block_size,
        head_dim=head_dim,
        element_bytes=element_bytes,
        shards=shards,
    )


def tp_layout(tp_size: int, num_q_heads: int = 9, num_kv_heads: int = 3) -> PoolLayout:
    shards = partition_heads(num_q_heads, num_kv_heads, tp_size)
    return layout_of(tuple((shard.kv_start, shard.kv_end) for shard in shards))


def heads_received(
    source: PoolLayout, destination: PoolLayout, slices: tuple[HeadSlice, ...]
) -> list[dict[int, int]]:
    """By destination rank: which head of the model each of its local heads gets."""
    received: list[dict[int, int]] = [{} for _ in destination.shards]
    for part in slices:
        source_start, source_end = source.shards[part.source_rank]
        for i in range(part.num_heads):
            head = source_start + part.source_head + i
            assert source_start <= head < source_end
            local = part.destination_head + i
            assert local not in received[part.destination_rank], "a head arrives twice"
            received[part.destination_rank][local] = head
    return received


def assert_fills(source: PoolLayout, destination: PoolLayout) -> None:
    slices = head_slices(source, destination)
    for rank, received in enumerate(heads_received(source, destination, slices)):
        start, end = destination.shards[rank]
        assert received == {head - start: head for head in range(start, end)}


def test_bytes_of_smollm2() -> None:
    layout = tp_layout(2)
    assert layout.shards == ((0, 2), (2, 3))
    assert layout.head_bytes == 16 * 64 * 2
    assert layout.page_bytes(0) == 245_760
    assert layout.page_bytes(1) == 122_880
    assert tp_layout(1).page_bytes(0) == 368_640


def test_equal_shards_are_whole_pages() -> None:
    assert head_slices(tp_layout(2), tp_layout(2)) == (
        HeadSlice(
            source_rank=0, destination_rank=0, source_head=0, destination_head=0, num_heads=2
        ),
        HeadSlice(
            source_rank=1, destination_rank=1, source_head=0, destination_head=0, num_heads=1
        ),
    )


def test_three_ranks_feed_two() -> None:
    assert head_slices(tp_layout(3), tp_layout(2)) == (
        HeadSlice(
            source_rank=0, destination_rank=0, source_head=0, destination_head=0, num_heads=1
        ),
        HeadSlice(
            source_rank=1, destination_rank=0, source_head=0, destination_head=1, num_heads=1
        ),
        HeadSlice(
            source_rank=2, destination_rank=1, source_head=0, destination_head=0, num_heads=1
        ),
    )


def test_replicated_head_comes_from_its_first_holder_and_goes_to_all() -> None:
    assert tp_layout(4).shards == ((0, 1), (0, 1), (1, 2), (2, 3))
    assert [part.source_rank for part in head_slices(tp_layout(4), tp_layout(1))] == [0, 2, 3]
    to_four = head_slices(tp_layout(1), tp_layout(4))
    assert [(part.destination_rank, part.source_head) for part in to_four] == [
        (0, 0),
        (1, 0),
        (2, 1),
        (3, 2),
    ]


@pytest.mark.parametrize("source_tp", [1, 2, 3, 4])
@pytest.mark.parametrize("destination_tp", [1, 2, 3, 4])
def test_every_destination_head_is_filled_once(source_tp: int, destination_tp: int) -> None:
    assert_fills(tp_layout(source_tp), tp_layout(destination_tp))


@given(st.integers(1, 16), st.integers(1, 6), st.data())
def test_any_model_between_any_two_degrees(kv_heads: int, group: int, data: st.DataObject) -> None:
    degrees = st.integers(1, kv_heads * group)
    source, destination = (
        tp_layout(data.draw(degrees), kv_heads * group, kv_heads) for _ in range(2)
    )
    assert_fills(source, destination)


@pytest.mark.parametrize("name", ["num_layers", "block_size", "head_dim", "element_bytes"])
def test_pages_of_different_models_are_refused_with_both_numbers(name: str) -> None:
    values = {"num_layers": 30, "block_size": 16, "head_dim": 64, "element_bytes": 2}
    ours = layout_of(((0, 3),), **values)
    theirs = layout_of(((0, 3),), **{**values, name: values[name] * 2})
    with pytest.raises(ValueError, match=f"{name} is {values[name]} .* {values[name] * 2} at"):
        head_slices(ours, theirs)


def test_head_that_no_source_rank_has_is_refused() -> None:
    with pytest.raises(ValueError, match="no rank of the source holds KV head 2"):
        head_slices(layout_of(((0, 2),)), layout_of(((0, 3),)))
