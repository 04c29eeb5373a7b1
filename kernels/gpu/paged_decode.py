"""Attention of sequences with few queries: the keys are split, the parts computed side by side.

Each split of SPLIT keys (Flash-Decoding) leaves (m, l, acc) of `attend_keys.py`; the merge is
    m = max m_x,   l = sum 2^(m_x - m) l_x,   acc = sum 2^(m_x - m) acc_x,
then the epilogue that prefills have too.
The split size and the order of the merge do not depend on how many sequences there are.

Shapes: S sequences, Q queries at most per sequence, X splits; partials acc_SQHXD, m and l SQHX,
all float32. A sequence of more than Q queries is left to `paged_prefill.py`.
"""

# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportOperatorIssue=false
# Reason: values inside a @triton.jit function have no Python types.

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pageray.kernels.gpu.attend_keys import attend_keys, first_visible_key, load_query
from pageray.kernels.gpu.attention_epilogue import output_weight
from pageray.kernels.gpu.attention_tiles import decode_tiles, padded_head_dim
from pageray.kernels.gpu.launch import Launch
from pageray.kernels.gpu.precision import common_dtype, dot_dtype, round_to
from pageray.kernels.gpu.score_scales import score_scales
from pageray.kernels.ops import AttentionOptions, RaggedBatch

MIN_SPLIT = 512
"""Keys per split: 256 KiB of K and V at D 128 in 16 bits, against 2 KiB of partials at G 4."""

MAX_SPLITS = 32
"""Bounds the partials, and the merge holds one weight for each."""


@dataclass(frozen=True, kw_only=True)
class Partials:
    """Scratch between the split kernel and the merge kernel."""

    m_SQHX: Tensor
    l_SQHX: Tensor
    acc_SQHXD: Tensor


def max_decode_queries(group_size: int, head_dim: int, element_bytes: int) -> int:
    """Queries of one sequence that fit the packed rows of one program."""
    return decode_tiles(group_size, head_dim, element_bytes).block_m // group_size


def split_size(max_kv_len: int) -> int:
    """MIN_SPLIT up to MAX_SPLITS * MIN_SPLIT tokens; beyond, the least double that is enough.

    So the result of a single query is bit-identical in every batch whose longest sequence has at
    most 16384 tokens, and beyond that in every batch of the same split size.
    """
    size = MIN_SPLIT
    while size * MAX_SPLITS < max_kv_len:
        size *= 2
    return size


def empty_partials(
    q_THD: Tensor, num_sequences: int, num_queries: int, num_splits: int
) -> Partials:
    """Uninitialised scratch; the merge reads only what the splits wrote."""
    _, num_heads, head_dim = q_THD.shape
    shape = (num_sequences, num_queries, num_heads, num_splits)
    return Partials(
        m_SQHX=torch.empty(shape, dtype=torch.float32, device=q_THD.device),
        l_SQHX=torch.empty(shape, dtype=torch.float32, device=q_THD.device),
        acc_SQHXD=torch.empty((*shape, head_dim), dtype=torch.float32, device=q_THD.device),
    )


# Grid: (S, K, X). One program: all queries of a sequence and the query heads of one KV head,
# against one split of the keys. Programs whose split is beyond the sequence return at once.
@triton.jit
def decode_kernel(
    q_ptr,
    kv_ptr,
    query_starts_ptr,
    kv_lens_ptr,
    tables_ptr,
    m_ptr,
    l_ptr,
    acc_ptr,
    stride_q_T,
    stride_q_H,
    stride_kv_B,
    stride_kv_2,
    stride_kv_K,
    stride_table_S,
    score_scale,
    softcap_log2,
    num_splits,
    H: tl.constexpr,
    G: tl.constexpr,
    Q: tl.constexpr,
    SPLIT: tl.constexpr,
    IS_CAPPED: tl.constexpr,
    WINDOW: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    query_start = tl.load(query_starts_ptr + sequence)
    num_queries = tl.load(query_starts_ptr + sequence + 1) - query_start
    if (num_queries == 0) | (num_queries > Q):
        return
    kv_len = tl.load(kv_lens_ptr + sequence)
    first_position = kv_len - num_queries
    first_key = tl.maximum(first_visible_key(first_position, WINDOW), split * SPLIT)
    end_key = tl.minimum(kv_len, (split + 1) * SPLIT)
    if first_key >= end_key:
        return

    row_M = tl.arange(0, BLOCK_M)
    query_M = row_M // G
    head_M = kv_head * G + row_M % G
    mask_M = query_M < num_queries
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
        first_key,
        end_key,
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

    part_M = ((sequence.to(tl.int64) * Q + query_M) * H + head_M) * num_splits + split
    tl.store(m_ptr + part_M, m_M, mask=mask_M)
    tl.store(l_ptr + part_M, l_M, mask=mask_M)
    d_D = tl.arange(0, BLOCK_D)
    mask_MD = mask_M[:, None] & (d_D < D)[None, :]
    tl.store(acc_ptr + part_M[:, None] * D + d_D[None, :], acc_MD, mask=mask_MD)


# Grid: (S * Q, H). One program: one query head of one token.
@triton.jit
def merge_kernel(
    m_ptr,
    l_ptr,
    acc_ptr,
    query_starts_ptr,
    kv_lens_ptr,
    sinks_ptr,
    out_ptr,
    v_scale,
    num_splits,
    H: tl.constexpr,
    Q: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    D: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    sequence = tl.program_id(0) // Q
    query = tl.program_id(0) % Q
    head = tl.program_id(1)
    query_start = tl.load(query_starts_ptr + sequence)
    num_queries = tl.load(query_starts_ptr + sequence + 1) - query_start
    if (num_queries > Q) | (query >= num_queries):
        return
    kv_len = tl.load(kv_lens_ptr + sequence)
    first_key = first_visible_key(kv_len - num_queries, WINDOW)

    split_X = tl.arange(0, BLOCK_X)
    is_live_X = (split_X >= first_key // SPLIT) & (split_X * SPLIT < kv_len)
    part = ((sequence.to(tl.int64) * Q + query) * H + head) * num_splits
    m_X = tl.load(m_ptr + part + split_X, mask=is_live_X, other=float("-inf"))
    l_X = tl.load(l_ptr + part + split_X, mask=is_live_X, other=0.0)
    d_D = tl.arange(0, BLOCK_D)
    mask_XD = is_live_X[:, None] & (d_D < D)[None, :]
    acc_XD_ptr = acc_ptr + (part + split_X)[:, None] * D + d_D[None, :]
    acc_XD = tl.load(acc_XD_ptr, mask=mask_XD, other=0.0)

    # A query sees itself, so the largest m is finite.
    m = tl.max(m_X, axis=0)
    factor_X = tl.exp2(m_X - m)
    weight = output_weight(m, tl.sum(factor_X * l_X, axis=0), head, sinks_ptr, v_scale)
    out_D = tl.sum(factor_X[:, None] * acc_XD, axis=0) * weight
    out_row_ptr = out_ptr + ((query_start + query).to(tl.int64) * H + head) * D
    tl.store(out_row_ptr + d_D, round_to(out_D, out_ptr.dtype.element_ty), mask=d_D < D)


def decode_launch(
    q_THD: Tensor,
    kv_B2KPD: Tensor,
    batch: RaggedBatch,
    partials: Partials,
    options: AttentionOptions,
) -> Launch:
    """Fill the partials of every sequence of at most Q queries."""
    _, num_heads, head_dim = q_THD.shape
    num_sequences, num_queries, _, num_splits = partials.m_SQHX.shape
    num_kv_heads, block_size = kv_B2KPD.shape[2:4]
    tiles = decode_tiles(
        num_heads // num_kv_heads, head_dim, common_dtype(q_THD, kv_B2KPD).itemsize
    )
    return Launch(
        kernel=decode_kernel,
        grid=(num_sequences, num_kv_heads, num_splits),
        args={
            "q_ptr": q_THD,
            "kv_ptr": kv_B2KPD,
            "query_starts_ptr": batch.query_starts_S1,
            "kv_lens_ptr": batch.kv_lens_S,
            "tables_ptr": batch.block_tables_SN,
            "m_ptr": partials.m_SQHX,
            "l_ptr": partials.l_SQHX,
            "acc_ptr": partials.acc_SQHXD,
            "stride_q_T": q_THD.stride(0),
            "stride_q_H": q_THD.stride(1),
            "stride_kv_B": kv_B2KPD.stride(0),
            "stride_kv_2": kv_B2KPD.stride(1),
            "stride_kv_K": kv_B2KPD.stride(2),
            "stride_table_S": batch.block_tables_SN.stride(0),
            **score_scales(options),
            "num_splits": num_splits,
        },
        constants={
            "H": num_heads,
            "G": num_heads // num_kv_heads,
            "Q": num_queries,
            "SPLIT": split_size(batch.max_kv_len),
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


def merge_launch(
    partials: Partials, batch: RaggedBatch, out_THD: Tensor, options: AttentionOptions
) -> Launch:
    """Write the rows of out that belong to sequences of at most Q queries."""
    num_sequences, num_queries, num_heads, num_splits = partials.m_SQHX.shape
    head_dim = out_THD.shape[2]
    return Launch(
        kernel=merge_kernel,
        grid=(num_sequences * num_queries, num_heads),
        args={
            "m_ptr": partials.m_SQHX,
            "l_ptr": partials.l_SQHX,
            "acc_ptr": partials.acc_SQHXD,
            "query_starts_ptr": batch.query_starts_S1,
            "kv_lens_ptr": batch.kv_lens_S,
            "sinks_ptr": options.sinks_H,
            "out_ptr": out_THD,
            "v_scale": options.v_scale,
            "num_splits": num_splits,
        },
        constants={
            "H": num_heads,
            "Q": num_queries,
            "SPLIT": split_size(batch.max_kv_len),
            "WINDOW": options.window,
            "D": head_dim,
            "BLOCK_X": MAX_SPLITS,
            "BLOCK_D": padded_head_dim(head_dim),
        },
        num_warps=4,
    )
