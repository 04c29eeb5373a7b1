"""Head partition: the worked examples of its docstring, and what holds for every model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pageray.cluster.errors import ConfigError
from pageray.cluster.head_partition import RankShard, partition_heads, split_range


@st.composite
def models(draw: st.DrawFn) -> tuple[int, int, int]:
    """(query heads, KV heads, tensor-parallel degree) that must be accepted."""
    num_kv_heads = draw(st.integers(1, 16))
    num_q_heads = num_kv_heads * draw(st.integers(1, 16))
    return num_q_heads, num_kv_heads, draw(st.integers(1, num_q_heads))


def test_uneven_groups_are_dealt_out_whole() -> None:
    assert partition_heads(9, 3, 2) == (RankShard(0, 6, 0, 2), RankShard(6, 9, 2, 3))


def test_above_the_kv_heads_a_kv_head_is_replicated() -> None:
    assert partition_heads(9, 3, 4) == (
        RankShard(0, 2, 0, 1),
        RankShard(2, 3, 0, 1),
        RankShard(3, 6, 1, 2),
        RankShard(6, 9, 2, 3),
    )


def test_one_head_per_rank_is_the_limit() -> None:
    assert [shard.num_q_heads for shard in partition_heads(9, 3, 9)] == [1] * 9
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 10.*9 query heads"):
        partition_heads(9, 3, 10)


@pytest.mark.parametrize(("q", "kv", "tp"), [(8, 3, 1), (0, 1, 1), (4, 2, 0), (4, 0, 1)])
def test_impossible_shapes_are_config_errors(q: int, kv: int, tp: int) -> None:
    with pytest.raises(ConfigError):
        partition_heads(q, kv, tp)


@given(models())
def test_every_query_head_is_on_exactly_one_rank(model: tuple[int, int, int]) -> None:
    num_q_heads, _, _ = model
    shards = partition_heads(*model)
    assert len(shards) == model[2]
    heads = [head for shard in shards for head in range(shard.q_start, shard.q_end)]
    assert heads == list(range(num_q_heads))
    assert all(shard.num_q_heads >= 1 for shard in shards)


@given(models())
def test_each_query_head_finds_its_own_kv_head_by_local_division(
    model: tuple[int, int, int],
) -> None:
    num_q_heads, num_kv_heads, _ = model
    for shard in partition_heads(*model):
        assert shard.num_q_heads % shard.num_kv_heads == 0
        local_group = shard.num_q_heads // shard.num_kv_heads
        for local_head in range(shard.num_q_heads):
            kv_head = (shard.q_start + local_head) // (num_q_heads // num_kv_heads)
            assert shard.kv_start + local_head // local_group == kv_head


@given(models())
def test_ranks_are_balanced_within_one_group(model: tuple[int, int, int]) -> None:
    num_q_heads, num_kv_heads, tp_size = model
    shards = partition_heads(*model)
    q_counts = [shard.num_q_heads for shard in shards]
    assert max(q_counts) - min(q_counts) <= num_q_heads // num_kv_heads
    kv_counts = [shard.num_kv_heads for shard in shards]
    assert max(kv_counts) - min(kv_counts) <= 1
    if tp_size >= num_kv_heads:
        assert max(kv_counts) == 1


@given(st.integers(0, 200), st.integers(1, 32))
def test_split_range_covers_in_order_and_evenly(n: int, parts: int) -> None:
    ranges = [split_range(n, parts, index) for index in range(parts)]
    assert [i for start, end in ranges for i in range(start, end)] == list(range(n))
    sizes = [end - start for start, end in ranges]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
