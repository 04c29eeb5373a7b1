"""Cuts a ragged batch into work items for paged attention, once per step.

An item is a run of keys of one block table and the queries that attend to it, at most a tile's;
each KV head does every item.
- Queries of one sequence come in tiles.
- A sequence whose queries all fit one tile (every decode) is cut along its keys too, every
  SPLIT_TOKENS from position 0, so that a long one occupies all threads.
- Single queries whose block tables begin with the same blocks read those once, together: an item
  of many queries over the shared keys, and one for what each has of its own (Hydragen, Juravsky et
  al. 2024, arXiv:2402.05099).
Results of a query that was cut are merged; see `attention_partials.py`.
"""

from dataclasses import dataclass

import numpy as np

from pageray.kernels.cpu.jit import jit
from pageray.kernels.cpu.memory import Array, Pointer, flat, pointer
from pageray.kernels.cpu.shared_prefix import find_shared_prefixes
from pageray.kernels.ops import RaggedBatch

TILE_ROWS = 96
"""Query rows (queries x query heads of one KV head) that share a load of K and V."""
SPLIT_TOKENS = 512

# Columns of an item. Its queries are rows FIRST_QUERY .. FIRST_QUERY + NUM_QUERIES - 1 of the
# plan's list; the results of query i go to place PARTIAL + i.
TABLE, FIRST_QUERY, NUM_QUERIES, FIRST_KEY, END_KEY, PARTIAL = range(6)
NOT_SPLIT = -1
# Columns of the list of queries.
TOKEN, POSITION = range(2)

Query = tuple[int, int, int, int, float, int, float]
"""Token stride and head stride of q, table width, group (query heads per KV head), scale,
window, softcap (0: none)."""

_Draft = tuple[Array, Array, Array, Array]
"""items, queries and merges, longer than they will be, and how much of each is filled."""
_ITEMS, _QUERIES, _MERGES, _PLACES = range(4)


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionPlan:
    """What every layer's attention does in a step; all arrays are int64."""

    items: Array
    """[items, 6], the columns above. Those over shared keys come last."""
    queries: Array
    """[queries, 2]: row of q, and position in the sequence."""
    merges: Array
    """[merges, 2]: row of q and a place of its results; a row's places follow each other."""
    num_places: int


def plan_attention(
    batch: RaggedBatch, group: int, window: int, block_size: int, num_blocks: int
) -> AttentionPlan:
    """`group` query heads share a KV head. Raises ValueError when the batch contradicts itself or
    names a block outside the pool."""
    num_sequences, width = batch.block_tables_SN.shape
    starts_at, kv_lens_at = pointer(batch.query_starts_S1), pointer(batch.kv_lens_S)
    tables_at = pointer(batch.block_tables_SN)
    shape = (num_sequences, width, block_size)
    bad = _first_bad_sequence(starts_at, kv_lens_at, tables_at, shape, num_blocks)
    if bad >= 0:
        raise _bad_sequence(batch, bad, block_size, num_blocks)
    leaders_S, shared_S = find_shared_prefixes(starts_at, kv_lens_at, tables_at, shape, window)
    items, queries, merges, num_places = _plan_items(
        starts_at, kv_lens_at, leaders_S, shared_S, queries_per_tile(group), window
    )
    return AttentionPlan(items=items, queries=queries, merges=merges, num_places=num_places)


@jit
def queries_per_tile(group: int) -> int:
    """How many queries fill a tile when `group` query heads share a KV head; at least one."""
    return max(1, TILE_ROWS // group)


def _bad_sequence(batch: RaggedBatch, s: int, block_size: int, num_blocks: int) -> ValueError:
    return ValueError(
        f"sequence {s} of the batch has queries "
        f"{batch.query_starts_S1[s].item()} .. {batch.query_starts_S1[s + 1].item()}, "
        f"{batch.kv_lens_S[s].item()} tokens and block table "
        f"{batch.block_tables_SN[s].tolist()}; it needs 1 token or more, no more queries "
        f"than tokens, and a table that covers them in blocks of {block_size} tokens with "
        f"ids in 0 .. {num_blocks - 1}"
    )


@jit
def _first_bad_sequence(
    starts_at: Pointer,
    kv_lens_at: Pointer,
    tables_at: Pointer,
    shape: tuple[int, int, int],
    num_blocks: int,
) -> int:
    """Index of the first sequence whose numbers contradict each other; -1 if there is none.

    Wrong are: more queries than tokens, no token, a table too short, a used block id outside the
    pool.
    """
    starts, kv_lens, tables = flat(starts_at, 0), flat(kv_lens_at, 0), flat(tables_at, 0)
    num_sequences, width, block_size = shape
    for s in range(num_sequences):
        num_queries, kv_len = starts[s + 1] - starts[s], kv_lens[s]
        num_used = (kv_len + block_size - 1) // block_size
        if num_queries < 0 or kv_len < max(num_queries, 1) or num_used > width:
            return s
        for n in range(num_used):
            block = tables[s * width + n]
            if block < 0 or block >= num_blocks:
                return s
    return -1


@jit
def _plan_items(
    starts_at: Pointer,
    kv_lens_at: Pointer,
    leaders: Array,
    shared: Array,
    tile: int,
    window: int,
) -> tuple[Array, Array, Array, int]:
    """(items, queries, merges, number of places); see `AttentionPlan`."""
    starts, kv_lens = flat(starts_at, 0), flat(kv_lens_at, 0)
    num_sequences = len(leaders)
    capacity = 0
    for s in range(num_sequences):
        capacity += (starts[s + 1] - starts[s]) // tile + 2 * (kv_lens[s] // SPLIT_TOKENS) + 4
    draft = (
        np.empty((capacity, 6), np.int64),
        np.empty((starts[num_sequences] + num_sequences, 2), np.int64),
        np.empty((capacity * tile, 2), np.int64),
        np.zeros(4, np.int64),
    )
    items, queries, merges, counts = draft
    first_places, strides = _add_shared_items(draft, starts, kv_lens, leaders, shared, tile)
    num_shared_items = counts[_ITEMS]
    for s in range(num_sequences):
        for piece in range((shared[s] + SPLIT_TOKENS - 1) // SPLIT_TOKENS):
            _add_merge(draft, starts[s], first_places[s] + piece * strides[s])
        _add_own_items(draft, starts, kv_lens, s, shared[s], tile, window)
    num_items = counts[_ITEMS]
    ordered = np.concatenate((items[num_shared_items:num_items], items[:num_shared_items]))
    return ordered, queries[: counts[_QUERIES]], merges[: counts[_MERGES]], counts[_PLACES]


@jit
def _add_shared_items(
    draft: _Draft, starts: Array, kv_lens: Array, leaders: Array, shared: Array, tile: int
) -> tuple[Array, Array]:
    """Items over the keys that sequences share, a tile's worth of members at a time.

    Returns for every sequence the place of its first result and how far on the next one is.
    """
    _, queries, _, counts = draft
    num_sequences = len(leaders)
    first_places = np.zeros(num_sequences, np.int64)
    strides = np.zeros(num_sequences, np.int64)
    for leader in range(num_sequences):
        first_member = leader if leaders[leader] == leader else num_sequences
        while first_member < num_sequences:
            first_query, member = counts[_QUERIES], first_member
            while member < num_sequences and counts[_QUERIES] - first_query < tile:
                if leaders[member] == leader:
                    first_places[member] = counts[_PLACES] + counts[_QUERIES] - first_query
                    _add_query(queries, counts, starts[member], kv_lens[member] - 1)
                member += 1
            num_queries = counts[_QUERIES] - first_query
            for s in range(first_member, member):
                if leaders[s] == leader:
                    strides[s] = num_queries
            if num_queries > 0:
                _add_pieces(draft, leader, first_query, 0, shared[leader], 1)
            first_member = member
    return first_places, strides


@jit
def _add_own_items(
    draft: _Draft,
    starts: Array,
    kv_lens: Array,
    s: int,
    num_shared: int,
    tile: int,
    window: int,
) -> None:
    """Items of sequence s, over the keys past the `num_shared` that it reads with others."""
    _, queries, _, counts = draft
    start, stop = np.int64(starts[s]), np.int64(starts[s + 1])
    for first in range(start, stop, tile):
        end = min(first + tile, stop)
        position = kv_lens[s] - (stop - first)
        first_query, first_place = counts[_QUERIES], counts[_PLACES]
        for token in range(first, end):
            _add_query(queries, counts, token, position + token - first)
        end_key = position + (end - first)
        first_key = max(0, position - window + 1) if window > 0 else num_shared
        is_long = end_key - first_key > SPLIT_TOKENS
        is_split = 1 if num_shared > 0 or (is_long and stop - start <= tile) else 0
        _add_pieces(draft, s, first_query, first_key, end_key, is_split)
        for token in range(first, end):
            for place in range(first_place, counts[_PLACES], end - first):
                _add_merge(draft, token, place + token - first)


@jit
def _add_pieces(
    draft: _Draft, table: int, first_query: int, first_key: int, end_key: int, is_split: int
) -> None:
    """Items of the queries listed last, over keys that are cut at multiples of SPLIT_TOKENS."""
    items, _, _, counts = draft
    num_queries = counts[_QUERIES] - first_query
    while first_key < end_key:
        cut = end_key
        if is_split:
            cut = min(end_key, (first_key // SPLIT_TOKENS + 1) * SPLIT_TOKENS)
        item = items[counts[_ITEMS]]
        item[TABLE], item[FIRST_QUERY], item[NUM_QUERIES] = table, first_query, num_queries
        item[FIRST_KEY], item[END_KEY] = first_key, cut
        item[PARTIAL] = counts[_PLACES] if is_split else NOT_SPLIT
        counts[_PLACES] += num_queries if is_split else 0
        counts[_ITEMS] += 1
        first_key = cut


@jit
def _add_query(queries: Array, counts: Array, token: int, position: int) -> None:
    queries[counts[_QUERIES], TOKEN] = token
    queries[counts[_QUERIES], POSITION] = position
    counts[_QUERIES] += 1


@jit
def _add_merge(draft: _Draft, token: int, place: int) -> None:
    _, _, merges, counts = draft
    merges[counts[_MERGES], 0] = token
    merges[counts[_MERGES], 1] = place
    counts[_MERGES] += 1


@jit
def attends_in_tile(position: int, window: int, tile_start: int, num_keys: int) -> tuple[int, int]:
    """The keys, as first and end index into a tile, that the query at `position` sees."""
    end = min(num_keys, position + 1 - tile_start)
    first = max(0, position - window + 1 - tile_start) if window > 0 else 0
    return first, max(first, end)
