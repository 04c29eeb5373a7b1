"""Cuts a ragged batch into work items for paged attention.

An item is a tile of consecutive queries of one sequence and the run of keys it attends to; each
KV head does every item. A sequence whose queries all fit one tile (every decode) is cut along its
keys too, every `SPLIT_TOKENS` from position 0, so that a long one occupies all threads. Where the
cuts fall depends on that sequence alone, never on its neighbours in the batch.
"""

import numpy as np

from pageray.kernels.cpu.jit import jit
from pageray.kernels.cpu.memory import Array, Pointer, flat

TILE_ROWS = 32
"""Query rows (queries x query heads of one KV head) that share a load of K and V."""
SPLIT_TOKENS = 512

# Columns of an item.
SEQUENCE, FIRST_QUERY, END_QUERY, FIRST_POSITION, FIRST_KEY, END_KEY, PARTIAL = range(7)
NOT_SPLIT = -1


@jit
def queries_per_tile(group: int) -> int:
    """How many queries fill a tile when `group` query heads share a KV head; at least one."""
    return max(1, TILE_ROWS // group)


@jit
def first_bad_sequence(
    starts_at: Pointer,
    kv_lens_at: Pointer,
    tables_at: Pointer,
    tables_shape: tuple[int, int],
    block_size: int,
    num_blocks: int,
) -> int:
    """Index of the first sequence whose numbers contradict each other; -1 if there is none.

    Wrong are: more queries than tokens, no token, a table too short, a used block id outside the
    pool.
    """
    starts, kv_lens, tables = flat(starts_at, 0), flat(kv_lens_at, 0), flat(tables_at, 0)
    num_sequences, width = tables_shape
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
def plan_items(
    starts_at: Pointer, kv_lens_at: Pointer, num_sequences: int, group: int, window: int
) -> tuple[Array, int]:
    """(int64 [items, 7] with the columns above, number of partial results)."""
    starts, kv_lens = flat(starts_at, 0), flat(kv_lens_at, 0)
    tile = queries_per_tile(group)
    capacity = 0
    for s in range(num_sequences):
        capacity += (starts[s + 1] - starts[s]) // tile + kv_lens[s] // SPLIT_TOKENS + 2
    items = np.empty((capacity, 7), dtype=np.int64)
    num_items = 0
    num_partials = 0
    for s in range(num_sequences):
        start, stop = np.int64(starts[s]), np.int64(starts[s + 1])
        for first in range(start, stop, tile):
            end = min(first + tile, stop)
            position = kv_lens[s] - (stop - first)
            end_key = position + (end - first)
            first_key = max(0, position - window + 1) if window > 0 else 0
            is_split = stop - start <= tile and end_key - first_key > SPLIT_TOKENS
            while first_key < end_key:
                cut = end_key
                if is_split:
                    cut = min(end_key, (first_key // SPLIT_TOKENS + 1) * SPLIT_TOKENS)
                item = items[num_items]
                item[SEQUENCE], item[FIRST_QUERY], item[END_QUERY] = s, first, end
                item[FIRST_POSITION], item[FIRST_KEY], item[END_KEY] = position, first_key, cut
                item[PARTIAL] = num_partials if is_split else NOT_SPLIT
                num_partials += 1 if is_split else 0
                num_items += 1
                first_key = cut
    return items[:num_items], num_partials


@jit
def attends_in_tile(position: int, window: int, tile_start: int, num_keys: int) -> tuple[int, int]:
    """The keys, as first and end index into a tile, that the query at `position` sees."""
    end = min(num_keys, position + 1 - tile_start)
    first = max(0, position - window + 1 - tile_start) if window > 0 else 0
    return first, max(first, end)
