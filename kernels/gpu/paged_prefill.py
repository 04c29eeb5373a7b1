"""Attention of sequences with many queries: a tile of packed query rows walks all its keys.

A tile holds BLOCK_M // G tokens of one sequence. Sequence s owns tiles from
query_starts[s] // TOKENS + s on: at least as many as it needs, at a place that a program finds
by binary search, so the host never has to read the query lengths. Surplus programs return.

Shapes: M packed rows, D head dim. Sequences of at most MIN_QUERIES - 1 queries are left to
`paged_decode.py`.
"""

# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# Reason: values inside a @triton.jit function have no Python types.

import triton
import triton.language as tl
from torch import Tensor

from pageray.kernels.gpu.attend_keys import attend_keys, first_visible_key, load_query
from pageray.kernels.gpu.attention_epilogue import output_weight
from pageray.kernels.gpu.attention_tiles import padded_head_dim, prefill_tiles
from pageray.kernels.gpu.launch import Launch
from pageray.kernels.gpu.precision import common_dtype, dot_dtype, round_to
from pageray.kernels.gpu.score_scales import score_scales
from pageray.kernels.ops import AttentionOptions, RaggedBatch


@triton.jit
def _sequence_of_tile(query_starts_ptr, tile, num_sequences, TOKENS: tl.constexpr):
    """The last sequence whose first tile is at or before `tile`."""
    low = tl.zeros((), tl.int32)
    high = num_sequences
    while low < high:
        middle = (low + high) // 2
        first_tile = tl.load(query_starts_ptr + middle) // TOKENS + middle
        if first_tile <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


# Grid: (T // TOKENS + S, K) with TOKENS = BLOCK_M // G.
@triton.jit
def prefill_kernel(
    q_ptr,
    kv_ptr,
    query_starts_ptr,
    kv_lens_ptr,
    tables_ptr,
    out_ptr,
    stride_q_T,
    stride_q_H,
    stride_kv_B,
    stride_kv_2,
    stride_kv_K,
    stride_table_S,
    sinks_ptr,
    score_scale,
    softcap_log2,
    v_scale,
    num_sequences,
    MIN_QUERIES: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    IS_CAPPED: tl.constexpr,
    WINDOW: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    TOKENS: tl.constexpr = BLOCK_M // G
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = _sequence_of_tile(query_starts_ptr, tile, num_sequences, TOKENS)
    query_start = tl.load(query_starts_ptr + sequence)
    num_queries = tl.load(query_starts_ptr + sequence + 1) - query_start
    first_query = (tile - (query_start // TOKENS + sequence)) * TOKENS
    if (num_queries < MIN_QUERIES) | (first_query >= num_queries):
        return
    first_position = tl.load(kv_lens_ptr + sequence) - num_queries
    end_query = tl.minimum(first_query + TOKENS, num_queries)

    row_M = tl.arange(0, BLOCK_M)
    query_M = first_query + row_M // G
    head_M = kv_head * G + row_M % G
    mask_M = query_M < end_query
    q_MD = load_query(
        q_ptr, query_start + query_M, head_M, mask_M, stride_q_T, stride_q_H, D, BLOCK_D
    )
    k_ptr = kv_ptr + kv_head * stride_kv_K
    m_M, l_M, acc_MD = attend_keys(
        q_MD.to(DOT_DTYPE),
        first_position + query_M,
        k_ptr,
        k_ptr + stride_kv_2,
        tables_ptr + sequence.to(tl.int64) * stride_table_S,
        stride_kv_B,
        first_visible_key(first_position + first_query, WINDOW),
        first_position + end_query,
        score_scale,
        softcap_log2,
        IS_CAPPED,
        WINDOW,
        P,
        D,
        BLOCK_M,
        BLOCK_D,
        TILE,
    )

    weight_M = output_weight(m_M, l_M, head_M, sinks_ptr, v_scale)
    d_D = tl.arange(0, BLOCK_D)
    out_offset_M = ((query_start + query_M).to(tl.int64) * H + head_M) * D
    tl.store(
        out_ptr + out_offset_M[:, None] + d_D[None, :],
        round_to(acc_MD * weight_M[:, None], out_ptr.dtype.element_ty),
        mask=mask_M[:, None] & (d_D < D)[None, :],
    )


def prefill_launch(
    q_THD: Tensor,
    kv_B2KPD: Tensor,
    batch: RaggedBatch,
    out_THD: Tensor,
    options: AttentionOptions,
    min_queries: int,
) -> Launch:
    """Write the rows of out that belong to sequences of at least `min_queries` queries."""
    num_tokens, num_heads, head_dim = q_THD.shape
    num_kv_heads, block_size = kv_B2KPD.shape[2:4]
    group_size = num_heads // num_kv_heads
    num_sequences = batch.kv_lens_S.shape[0]
    tiles = prefill_tiles(group_size, head_dim, common_dtype(q_THD, kv_B2KPD).itemsize)
    return Launch(
        kernel=prefill_kernel,
        grid=(num_tokens // (tiles.block_m // group_size) + num_sequences, num_kv_heads),
        args={
            "q_ptr": q_THD,
            "kv_ptr": kv_B2KPD,
            "query_starts_ptr": batch.query_starts_S1,
            "kv_lens_ptr": batch.kv_lens_S,
            "tables_ptr": batch.block_tables_SN,
            "out_ptr": out_THD,
            "stride_q_T": q_THD.stride(0),
            "stride_q_H": q_THD.stride(1),
            "stride_kv_B": kv_B2KPD.stride(0),
            "stride_kv_2": kv_B2KPD.stride(1),
            "stride_kv_K": kv_B2KPD.stride(2),
            "stride_table_S": batch.block_tables_SN.stride(0),
            "sinks_ptr": options.sinks_H,
            **score_scales(options),
            "v_scale": options.v_scale,
            "num_sequences": num_sequences,
        },
        constants={
            "MIN_QUERIES": min_queries,
            "H": num_heads,
            "G": group_size,
            "IS_CAPPED": options.softcap > 0,
            "WINDOW": options.window,
            "P": block_size,
            "D": head_dim,
            "BLOCK_M": tiles.block_m,
            "BLOCK_D": padded_head_dim(head_dim),
            "TILE": tiles.tile,
            "DOT_DTYPE": dot_dtype(q_THD, kv_B2KPD),
        },
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        hip_num_stages=tiles.hip_num_stages,
    )
