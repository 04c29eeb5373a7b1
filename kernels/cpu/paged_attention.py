"""out = softmax(q k^T * scale + causal mask) v over paged K and V, with an online softmax.

For each tile of keys, with m the largest score so far (Milakov and Gimelshein 2018,
arXiv:1805.02867; tiles: Dao et al. 2022, arXiv:2205.14135):
    m' = max(m, max scores);  w = exp(scores - m');  a = exp(m - m')
    total = a total + sum w;  out = a out + w V;     at the end out / total
Pages are read through the block table into a tile of `TILE_KEYS`; no sequence is ever gathered.
Results of a sequence whose keys were split merge by the same formula.
"""

import numpy as np
import torch
from torch import Tensor

from pageray.kernels.cpu.attention_partials import (
    Partials,
    keep_partial,
    max_rows_of,
    merge_partials,
    new_partials,
    store_rows,
)
from pageray.kernels.cpu.attention_plan import (
    END_KEY,
    END_QUERY,
    FIRST_KEY,
    FIRST_POSITION,
    FIRST_QUERY,
    NOT_SPLIT,
    PARTIAL,
    SEQUENCE,
    attends_in_tile,
    first_bad_sequence,
    plan_items,
)
from pageray.kernels.cpu.attention_tile import (
    TILE_KEYS,
    Scratch,
    add_values,
    load_keys,
    new_scratch,
    scores,
    softmax_row,
)
from pageray.kernels.cpu.jit import jit, jit_threaded, num_threads, prange
from pageray.kernels.cpu.memory import (
    Array,
    Pointer,
    flat,
    pointer,
    require_dtype,
    require_float,
    require_shape,
)
from pageray.kernels.cpu.numerics import (
    INFINITY,
    ZERO,
    exp_of_negative,
    float32,
    widen,
)
from pageray.kernels.cpu.pages import PageLayout, page_layout
from pageray.kernels.cpu.work_counter import fetch_add_one
from pageray.kernels.ops import RaggedBatch

_Query = tuple[int, int, int, int, float, int]
"""Token stride and head stride of q, table width, group (query heads per KV head), scale,
window."""


def paged_attention(
    q_THD: Tensor, kv_B2KPD: Tensor, batch: RaggedBatch, scale: float, window: int
) -> Tensor:
    """A new [T, H, D] tensor of q's dtype; `Ops.paged_attention` has the contract.

    Raises ValueError when shapes contradict each other or a block id is outside the pool.
    """
    layout = page_layout(kv_B2KPD)
    _check(q_THD, kv_B2KPD, batch)
    if window < 0:
        raise ValueError(f"window is {window}; it must be positive, or 0 for none")
    num_tokens, num_heads, head_dim = q_THD.shape
    num_kv_heads = kv_B2KPD.shape[2]
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype)
    tables_SN = batch.block_tables_SN
    query = (
        q_THD.stride(0),
        q_THD.stride(1),
        tables_SN.shape[1],
        num_heads // num_kv_heads,
        scale,
        window,
    )
    args = (
        pointer(q_THD),
        query,
        pointer(kv_B2KPD),
        layout,
        pointer(batch.query_starts_S1),
        pointer(batch.kv_lens_S),
        pointer(tables_SN),
        tables_SN.shape[0],
        pointer(out_THD),
    )
    num_parts = num_threads(num_tokens * num_kv_heads * head_dim * batch.max_kv_len)
    if num_parts == 1:
        _attend(*args)
    else:
        _attend_threaded(*args, num_parts)
    return out_THD


def _check(q_THD: Tensor, kv_B2KPD: Tensor, batch: RaggedBatch) -> None:
    require_float("q", q_THD)
    num_blocks, _, num_kv_heads, block_size, head_dim = kv_B2KPD.shape
    require_shape("q", q_THD, q_THD.shape[0], q_THD.shape[1], head_dim)
    if q_THD.shape[1] % num_kv_heads:
        raise ValueError(
            f"q has {q_THD.shape[1]} heads; it must be a multiple of the {num_kv_heads} KV heads"
        )
    num_sequences, width = batch.block_tables_SN.shape
    require_shape("kv_lens", batch.kv_lens_S, num_sequences)
    require_shape("query_starts", batch.query_starts_S1, num_sequences + 1)
    require_dtype("block_tables", batch.block_tables_SN, torch.int32)
    require_dtype("kv_lens", batch.kv_lens_S, torch.int32)
    require_dtype("query_starts", batch.query_starts_S1, torch.int32)
    bad = first_bad_sequence(
        pointer(batch.query_starts_S1),
        pointer(batch.kv_lens_S),
        pointer(batch.block_tables_SN),
        (num_sequences, width),
        block_size,
        num_blocks,
    )
    if bad >= 0:
        raise ValueError(
            f"sequence {bad} of the batch has queries "
            f"{batch.query_starts_S1[bad].item()} .. {batch.query_starts_S1[bad + 1].item()}, "
            f"{batch.kv_lens_S[bad].item()} tokens and block table "
            f"{batch.block_tables_SN[bad].tolist()}; it needs 1 token or more, no more queries "
            f"than tokens, and a table that covers them in blocks of {block_size} tokens with "
            f"ids in 0 .. {num_blocks - 1}"
        )


@jit
def _attend(
    q_at: Pointer,
    query: _Query,
    kv_at: Pointer,
    layout: PageLayout,
    starts_at: Pointer,
    kv_lens_at: Pointer,
    tables_at: Pointer,
    num_sequences: int,
    out_at: Pointer,
) -> None:
    group, window = query[3], query[5]
    items, num_partials = plan_items(starts_at, kv_lens_at, num_sequences, group, window)
    partials = new_partials(num_partials, group, layout)
    counter = np.zeros(1, dtype=np.int64)
    _work(q_at, query, kv_at, layout, tables_at, out_at, items, partials, counter)
    merge_partials(items, partials, group, layout, out_at)


@jit_threaded
def _attend_threaded(
    q_at: Pointer,
    query: _Query,
    kv_at: Pointer,
    layout: PageLayout,
    starts_at: Pointer,
    kv_lens_at: Pointer,
    tables_at: Pointer,
    num_sequences: int,
    out_at: Pointer,
    num_parts: int,
) -> None:
    group, window = query[3], query[5]
    items, num_partials = plan_items(starts_at, kv_lens_at, num_sequences, group, window)
    partials = new_partials(num_partials, group, layout)
    counter = np.zeros(1, dtype=np.int64)
    for _ in prange(num_parts):
        _work(q_at, query, kv_at, layout, tables_at, out_at, items, partials, counter)
    merge_partials(items, partials, group, layout, out_at)


@jit
def _work(
    q_at: Pointer,
    query: _Query,
    kv_at: Pointer,
    layout: PageLayout,
    tables_at: Pointer,
    out_at: Pointer,
    items: Array,
    partials: Partials,
    counter: Array,
) -> None:
    """One thread's share: take (item, KV head) pairs off the counter until there are none.

    The last item goes first: inside a sequence it has the most keys.
    """
    _, _, table_width, group, _, _ = query
    _, _, _, num_kv_heads, _, head_dim = layout
    scratch = new_scratch(max_rows_of(group), head_dim)
    num_units = len(items) * num_kv_heads
    unit = fetch_add_one(counter)
    while unit < num_units:
        item = items[len(items) - 1 - unit // num_kv_heads]
        head = unit % num_kv_heads
        table = flat(tables_at, item[SEQUENCE] * table_width)
        _load_queries(q_at, query, item, head, scratch)
        _attend_item(kv_at, layout, query, table, item, head, scratch)
        if item[PARTIAL] == NOT_SPLIT:
            _, _, _, _, sum_MD, _, total_M = scratch
            store_rows(sum_MD, total_M, item, head, group, layout, out_at)
        else:
            num_rows = (item[END_QUERY] - item[FIRST_QUERY]) * group
            keep_partial(scratch, num_rows, partials, item[PARTIAL] * num_kv_heads + head)
        unit = fetch_add_one(counter)


@jit
def _load_queries(q_at: Pointer, query: _Query, item: Array, head: int, scratch: Scratch) -> None:
    """Scaled float32 query rows, and an empty softmax state."""
    q_MD, _, _, _, sum_MD, largest_M, total_M = scratch
    token_stride, head_stride, _, group, scale, _ = query
    factor = float32(scale)
    for row in range((item[END_QUERY] - item[FIRST_QUERY]) * group):
        token, q_head = item[FIRST_QUERY] + row // group, head * group + row % group
        source = flat(q_at, token * token_stride + q_head * head_stride)
        for d in range(q_MD.shape[1]):
            q_MD[row, d] = widen(source[d]) * factor
            sum_MD[row, d] = ZERO
        largest_M[row] = -INFINITY
        total_M[row] = ZERO


@jit
def _attend_item(
    kv_at: Pointer,
    layout: PageLayout,
    query: _Query,
    table: Array,
    item: Array,
    head: int,
    scratch: Scratch,
) -> None:
    """Run the item's keys, tile by tile, through the softmax state of its rows."""
    q_MD, k_JD, v_JD, weights_MJ, sum_MD, _, _ = scratch
    _, _, _, group, _, window = query
    _, plane_stride, head_stride, _, _, _ = layout
    num_rows = (item[END_QUERY] - item[FIRST_QUERY]) * group
    start = item[FIRST_KEY]
    while start < item[END_KEY]:
        # Tiles start at multiples of TILE_KEYS, so rounding does not depend on the chunking.
        stop = min(item[END_KEY], (start // TILE_KEYS + 1) * TILE_KEYS)
        num_keys = stop - start
        place = head * head_stride
        load_keys(kv_at, layout, place, table, start, stop, k_JD)
        scores(q_MD, k_JD, weights_MJ, num_rows, num_keys)
        num_padded = load_keys(kv_at, layout, place + plane_stride, table, start, stop, v_JD)
        for row in range(num_rows):
            position = item[FIRST_POSITION] + row // group
            first, end = attends_in_tile(position, window, start, num_keys)
            _update_row(scratch, row, first, end, num_padded)
        add_values(sum_MD, weights_MJ, v_JD, num_rows, num_padded)
        start = stop


@jit
def _update_row(scratch: Scratch, row: int, first: int, end: int, num_padded: int) -> None:
    """Scores of a row become weights; its state so far is scaled to the new largest score."""
    _, _, _, weights_MJ, sum_MD, largest_M, total_M = scratch
    weights_J, sum_D = weights_MJ[row], sum_MD[row]
    before = largest_M[row]
    largest = softmax_row(weights_J, first, end, num_padded, before)
    total = ZERO
    for j in range(num_padded):
        total += weights_J[j]
    if largest != before:
        factor = exp_of_negative(before - largest)
        for d in range(len(sum_D)):
            sum_D[d] *= factor
        total_M[row] *= factor
        largest_M[row] = largest
    total_M[row] += total
