"""Causal attention as `AttentionOptions` has it over paged K and V, with an online softmax.

For each tile of keys, with m the largest score so far (Milakov and Gimelshein 2018,
arXiv:1805.02867; tiles: Dao et al. 2022, arXiv:2205.14135):
    m' = max(m, max scores);  w = exp(scores - m');  a = exp(m - m')
    total = a total + sum w;  out = a out + w V;     at the end out / total
Pages are read through the block table into a tile of `TILE_KEYS`; no sequence is ever gathered.
Results of a sequence whose keys were split merge by the same formula.
"""

from typing import cast

import numpy as np
import torch
from torch import Tensor

from pageray.kernels.cpu.attention_partials import (
    NO_SINKS,
    OutputShape,
    Partials,
    addresses_of,
    keep_partial,
    merge_partials,
    new_partials,
    start_of_query,
    store_row,
)
from pageray.kernels.cpu.attention_plan import (
    END_KEY,
    FIRST_KEY,
    FIRST_QUERY,
    NOT_SPLIT,
    NUM_QUERIES,
    PARTIAL,
    POSITION,
    TABLE,
    TOKEN,
    AttentionPlan,
    Query,
    attends_in_tile,
    plan_attention,
    queries_per_tile,
)
from pageray.kernels.cpu.attention_tile import (
    TILE_KEYS,
    Scratch,
    add_values,
    cap_scores,
    carve_scratch,
    floats,
    padded_dim,
    score_keys,
    scratch_bytes,
    update_row,
)
from pageray.kernels.cpu.jit import jit, jit_threaded, num_threads, part, prange
from pageray.kernels.cpu.matrix_attention import (
    attend_in_matrix,
    carve_matrix_scratch,
    fits_matrix_registers,
    matrix_scratch_bytes,
    whole_panels,
)
from pageray.kernels.cpu.matrix_tile import (
    HAS_MATRIX_REGISTERS,
    MAX_MATRIX_ROWS,
    attends_in_matrix_registers,
    give_back_matrix_registers,
    take_matrix_registers,
)
from pageray.kernels.cpu.memory import (
    INDEX_CELL,
    Array,
    Pointer,
    flat,
    pointer,
    require_dtype,
    require_float,
    require_shape,
)
from pageray.kernels.cpu.numerics import INFINITY, ZERO, float32, widen
from pageray.kernels.cpu.pages import PageLayout, page_layout, require_unscaled
from pageray.kernels.cpu.work_counter import fetch_add_one, new_counters
from pageray.kernels.ops import AttentionOptions, RaggedBatch

_MANY_ITEMS = 16
"""From so many on, heads need not be spread over threads to keep all of them busy."""


def paged_attention(
    q_THD: Tensor, kv_B2KPD: Tensor, batch: RaggedBatch, options: AttentionOptions
) -> Tensor:
    """A new [T, H, D] tensor of q's dtype; `Ops.paged_attention` has the contract.

    Raises ValueError when shapes contradict each other or a block id is outside the pool, and for
    KV scales other than 1: they belong to 8-bit pools, which the CPU has none of.
    """
    layout = page_layout(kv_B2KPD)
    _check(q_THD, kv_B2KPD)
    require_unscaled(options.k_scale, options.v_scale)
    num_tokens, num_heads, head_dim = q_THD.shape
    num_kv_heads = kv_B2KPD.shape[2]
    group = num_heads // num_kv_heads
    plan = planned(batch, kv_B2KPD, group, options.window)
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype)
    query = (
        q_THD.stride(0),
        q_THD.stride(1),
        batch.block_tables_SN.shape[1],
        group,
        options.scale,
        options.window,
        options.softcap,
    )
    args = (
        pointer(q_THD),
        query,
        pointer(kv_B2KPD),
        layout,
        pointer(batch.block_tables_SN),
        plan.items,
        plan.queries,
        plan.merges,
        plan.num_places,
        pointer(out_THD),
        (num_heads, head_dim, sinks_address(options.sinks_H, num_heads)),
    )
    num_parts = num_threads(num_tokens * num_kv_heads * head_dim * batch.max_kv_len)
    if num_parts == 1:
        _attend(*args)
    else:
        _attend_threaded(*args, num_parts)
    return out_THD


def planned(batch: RaggedBatch, kv_B2KPD: Tensor, group: int, window: int) -> AttentionPlan:
    """Worked out by the first layer of a step, and kept with the batch for the others."""
    num_blocks, _, _, block_size, _ = kv_B2KPD.shape
    key = ("attention plan", group, window, block_size, num_blocks)
    plan = batch.memo.get(key)
    if plan is None:
        _check_batch(batch)
        plan = plan_attention(batch, group, window, block_size, num_blocks)
        batch.memo[key] = plan
    return cast("AttentionPlan", plan)


def sinks_address(sinks_H: Tensor | None, num_heads: int) -> int:
    if sinks_H is None:
        return NO_SINKS
    require_shape("sinks", sinks_H, num_heads)
    require_dtype("sinks", sinks_H, torch.float32)
    return pointer(sinks_H)[0]


def _check(q_THD: Tensor, kv_B2KPD: Tensor) -> None:
    require_float("q", q_THD)
    num_kv_heads, head_dim = kv_B2KPD.shape[2], kv_B2KPD.shape[4]
    require_shape("q", q_THD, q_THD.shape[0], q_THD.shape[1], head_dim)
    if q_THD.shape[1] % num_kv_heads:
        raise ValueError(
            f"q has {q_THD.shape[1]} heads; it must be a multiple of the {num_kv_heads} KV heads"
        )


def _check_batch(batch: RaggedBatch) -> None:
    num_sequences = batch.block_tables_SN.shape[0]
    require_shape("kv_lens", batch.kv_lens_S, num_sequences)
    require_shape("query_starts", batch.query_starts_S1, num_sequences + 1)
    require_dtype("block_tables", batch.block_tables_SN, torch.int32)
    require_dtype("kv_lens", batch.kv_lens_S, torch.int32)
    require_dtype("query_starts", batch.query_starts_S1, torch.int32)


@jit
def merge_part(
    merges: Array,
    index: int,
    num_parts: int,
    partials: Partials,
    out_at: Pointer,
    out_shape: OutputShape,
) -> None:
    """One thread's share of the queries that were cut."""
    first, end = part(len(merges), num_parts, index)
    first, end = start_of_query(merges, first), start_of_query(merges, end)
    merge_partials(merges, first, end, partials, out_at, out_shape)


@jit
def _attend(
    q_at: Pointer,
    query: Query,
    kv_at: Pointer,
    layout: PageLayout,
    tables_at: Pointer,
    items: Array,
    queries: Array,
    merges: Array,
    num_places: int,
    out_at: Pointer,
    out_shape: OutputShape,
) -> None:
    partials = new_partials(num_places, out_shape[0], out_shape[1])
    counter = new_counters(1)[0]
    attend_units(
        q_at,
        query,
        kv_at,
        layout,
        tables_at,
        out_at,
        out_shape,
        items,
        queries,
        partials,
        counter,
    )
    merge_partials(merges, 0, len(merges), partials, out_at, out_shape)


@jit_threaded
def _attend_threaded(
    q_at: Pointer,
    query: Query,
    kv_at: Pointer,
    layout: PageLayout,
    tables_at: Pointer,
    items: Array,
    queries: Array,
    merges: Array,
    num_places: int,
    out_at: Pointer,
    out_shape: OutputShape,
    num_parts: int,
) -> None:
    partials = new_partials(num_places, out_shape[0], out_shape[1])
    counter = new_counters(1)[0]
    for _ in prange(num_parts):
        attend_units(
            q_at,
            query,
            kv_at,
            layout,
            tables_at,
            out_at,
            out_shape,
            items,
            queries,
            partials,
            counter,
        )
    if len(merges) > 0:
        for index in prange(num_parts):
            merge_part(merges, index, num_parts, partials, out_at, out_shape)


@jit
def attend_units(
    q_at: Pointer,
    query: Query,
    kv_at: Pointer,
    layout: PageLayout,
    tables_at: Pointer,
    out_at: Pointer,
    out_shape: OutputShape,
    items: Array,
    queries: Array,
    partials: Partials,
    counter: Array,
) -> None:
    """One thread's share: take (item, KV head) pairs off the counter until there are none.

    The last item goes first: inside a sequence it has the most keys, and shared keys come last.
    The arrays are the caller's, who keeps them alive.
    """
    _, _, table_width, group, _, _, _ = query
    _, _, _, num_kv_heads, _, head_dim = layout
    max_rows = whole_panels(queries_per_tile(group) * group)
    has_registers = attends_in_matrix_registers(kv_at[1])
    num_bytes = scratch_bytes(max_rows, head_dim)
    more_bytes = matrix_scratch_bytes(max_rows, head_dim) if has_registers else 0
    memory = np.empty(num_bytes + more_bytes, np.uint8)
    scratch = carve_scratch(memory.ctypes.data, max_rows, head_dim)
    matrix = carve_matrix_scratch(memory.ctypes.data + num_bytes, max_rows, head_dim)
    partial_rows = addresses_of(partials)
    if has_registers:
        take_matrix_registers(MAX_MATRIX_ROWS)
    in_matrix = has_registers and fits_matrix_registers(head_dim, query[6])
    num_units = len(items) * num_kv_heads
    # With many items a thread takes all heads of one: they lie side by side in the same pages.
    heads_at_once = num_kv_heads if len(items) >= _MANY_ITEMS else 1
    unit = fetch_add_one(counter) * heads_at_once
    while unit < num_units:
        item = items[len(items) - 1 - unit // num_kv_heads]
        head = unit % num_kv_heads
        table = flat(tables_at, item[TABLE] * table_width)
        own = queries[item[FIRST_QUERY] : item[FIRST_QUERY] + item[NUM_QUERIES]]
        own_at, num_own = own.ctypes.data, len(own)
        keys = (item[FIRST_KEY], item[END_KEY])
        # Numba leaves this branch out, uncompiled, where the constant is False.
        if HAS_MATRIX_REGISTERS:  # noqa: SIM102
            if in_matrix:
                attend_in_matrix(
                    q_at, kv_at, layout, query, table, keys, own_at, num_own, head, scratch, matrix
                )
        if not in_matrix:
            _load_queries(q_at, query, head_dim, own_at, num_own, head, scratch)
            _attend_item(kv_at, layout, query, table, keys, own_at, num_own, head, scratch)
        _keep_results(
            scratch, item[PARTIAL], own_at, num_own, head, group, partial_rows, out_at, out_shape
        )
        unit += 1
        if unit % heads_at_once == 0:
            unit = fetch_add_one(counter) * heads_at_once
    if has_registers:
        give_back_matrix_registers()
    # Used by name once more, so that what is reached by address alone is still there until here.
    memory[:1] = 0


@jit
def _keep_results(
    scratch: Scratch,
    partial: int,
    queries_at: int,
    num_queries: int,
    head: int,
    group: int,
    partial_rows: tuple[int, int, int],
    out_at: Pointer,
    out_shape: OutputShape,
) -> None:
    """Store an item's rows, or keep them for the merge, from place `partial` on."""
    _, _, _, _, sums, largests, totals = scratch
    num_heads, head_dim, _ = out_shape
    padded = padded_dim(head_dim)
    for index in range(num_queries):
        token = flat((queries_at, INDEX_CELL), 2 * index + TOKEN)[0]
        for member in range(group):
            row, q_head = index * group + member, head * group + member
            if partial == NOT_SPLIT:
                largest, total = floats(largests, row)[0], floats(totals, row)[0]
                at = sums + 4 * row * padded
                store_row(at, largest, total, token, q_head, out_at, out_shape)
            else:
                place_row = (partial + index) * num_heads + q_head
                keep_partial(scratch, padded, row, partial_rows, place_row, head_dim)


@jit
def _load_queries(
    q_at: Pointer,
    query: Query,
    head_dim: int,
    queries_at: int,
    num_queries: int,
    head: int,
    scratch: Scratch,
) -> None:
    """Scaled float32 query rows, and an empty softmax state."""
    q, _, _, _, sums, largests, totals = scratch
    token_stride, head_stride, _, group, scale, _, _ = query
    factor, padded = float32(scale), padded_dim(head_dim)
    for row in range(num_queries * group):
        token = flat((queries_at, INDEX_CELL), row // group * 2 + TOKEN)[0]
        source = flat(q_at, token * token_stride + (head * group + row % group) * head_stride)
        target, sum_DP = floats(q, row * head_dim), floats(sums, row * padded)
        for d in range(head_dim):
            target[d] = widen(source[d]) * factor
        for d in range(padded):
            sum_DP[d] = ZERO
        floats(largests, row)[0] = -INFINITY
        floats(totals, row)[0] = ZERO


@jit
def _attend_item(
    kv_at: Pointer,
    layout: PageLayout,
    query: Query,
    table: Array,
    keys: tuple[int, int],
    queries_at: int,
    num_queries: int,
    head: int,
    scratch: Scratch,
) -> None:
    """Run the keys first .. end - 1 of `keys`, tile by tile, through the softmax of the rows."""
    _, _, _, group, _, window, softcap = query
    _, plane_stride, head_stride, _, _, head_dim = layout
    num_rows, padded = num_queries * group, padded_dim(head_dim)
    place = head * head_stride
    start, end_key = keys
    while start < end_key:
        # Tiles start at multiples of TILE_KEYS, so rounding does not depend on the chunking.
        stop = min(end_key, (start // TILE_KEYS + 1) * TILE_KEYS)
        score_keys(kv_at, layout, place, table, start, stop, scratch, num_rows)
        if softcap > 0.0:
            cap_scores(scratch, num_rows, stop - start, float32(softcap))
        for row in range(num_rows):
            position = flat((queries_at, INDEX_CELL), row // group * 2 + POSITION)[0]
            first, end = attends_in_tile(position, window, start, stop - start)
            update_row(scratch, padded, row, first, end, stop - start)
        add_values(kv_at, layout, place + plane_stride, table, start, stop, scratch, num_rows)
        start = stop
