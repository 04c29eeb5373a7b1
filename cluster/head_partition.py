"""Which attention heads each rank of a tensor-parallel engine holds. Pure arithmetic.

With grouped-query attention a KV head and the query heads that read it form a group. Groups are
dealt out in order; when the degree does not divide them, the first ranks get one more. Above the
number of KV heads a KV head is replicated and its query heads are split among its ranks.

9 query heads, 3 KV heads:
    TP 2:  rank 0: q 0..5, kv 0..1 | rank 1: q 6..8, kv 2
    TP 4:  rank 0: q 0..1, kv 0 | rank 1: q 2, kv 0 | rank 2: q 3..5, kv 1 | rank 3: q 6..8, kv 2
"""

from dataclasses import dataclass

from pageray.cluster.errors import ConfigError


@dataclass(frozen=True)
class RankShard:
    """The heads of one rank: query heads q_start..q_end - 1 and KV heads kv_start..kv_end - 1.

    Heads are numbered as in the whole model. The rank's query heads divide evenly over its KV
    heads: local query head h reads local KV head h // (num_q_heads / num_kv_heads).
    """

    q_start: int
    q_end: int
    kv_start: int
    kv_end: int

    @property
    def num_q_heads(self) -> int:
        return self.q_end - self.q_start

    @property
    def num_kv_heads(self) -> int:
        return self.kv_end - self.kv_start


def partition_heads(num_q_heads: int, num_kv_heads: int, tp_size: int) -> tuple[RankShard, ...]:
    """The shard of every rank, in rank order; each has at least one query head.

    Every query head is on exactly one rank. Raises `ConfigError` when the query heads do not
    divide evenly over the KV heads, or when `tp_size` is above the number of query heads.
    """
    if num_q_heads < 1 or num_kv_heads < 1 or num_q_heads % num_kv_heads != 0:
        raise ConfigError(
            f"{num_q_heads} query heads cannot be grouped evenly over {num_kv_heads} KV heads."
        )
    if not 1 <= tp_size <= num_q_heads:
        raise ConfigError(
            f"tensor_parallel_size is {tp_size}; this model has {num_q_heads} query heads, so it "
            f"must be between 1 and {num_q_heads}."
        )
    group_size = num_q_heads // num_kv_heads
    if tp_size <= num_kv_heads:
        return tuple(_whole_groups(group_size, num_kv_heads, tp_size, r) for r in range(tp_size))
    shards: list[RankShard] = []
    for kv_head in range(num_kv_heads):
        first_rank, end_rank = split_range(tp_size, num_kv_heads, kv_head)
        shards += _split_group(group_size, kv_head, end_rank - first_rank)
    return tuple(shards)


def split_range(n: int, parts: int, index: int) -> tuple[int, int]:
    """(start, end) of part `index` when 0..n - 1 is cut into `parts` consecutive parts.

    Sizes differ by at most one, larger parts first; with n < parts the last parts are empty.
    """
    base, remainder = divmod(n, parts)
    start = index * base + min(index, remainder)
    return start, start + base + (1 if index < remainder else 0)


def _whole_groups(group_size: int, num_kv_heads: int, tp_size: int, rank: int) -> RankShard:
    kv_start, kv_end = split_range(num_kv_heads, tp_size, rank)
    return RankShard(kv_start * group_size, kv_end * group_size, kv_start, kv_end)


def _split_group(group_size: int, kv_head: int, num_ranks: int) -> list[RankShard]:
    """One KV head on `num_ranks` ranks, each with a part of its query heads."""
    first_q = kv_head * group_size
    bounds = (split_range(group_size, num_ranks, part) for part in range(num_ranks))
    return [
        RankShard(first_q + start, first_q + end, kv_head, kv_head + 1) for start, end in bounds
    ]
