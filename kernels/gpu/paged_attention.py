"""Causal attention as `AttentionOptions` has it, K and V read through the block table.

Sequences of few queries go to `paged_decode.py`, which splits their keys over many programs;
the others go to `paged_prefill.py`. Both kernels are launched over the whole batch and skip what
is the other's, so the host needs nothing but the two maxima of the batch, and never waits for
the device.

Shapes: q_THD maybe strided; kv_B2KPD one layer of the pool; out_THD contiguous.
"""

import torch
import triton
from torch import Tensor

from pageray.kernels.gpu.attention_tiles import MAX_BLOCK_SIZE, MAX_HEAD_DIM
from pageray.kernels.gpu.checks import (
    check_contiguous,
    check_dtype,
    check_kv_layer,
    check_last_dim_contiguous,
    check_ndim,
    check_shape,
    check_vector,
)
from pageray.kernels.gpu.launch import Launch, run
from pageray.kernels.gpu.paged_decode import (
    decode_launch,
    empty_partials,
    max_decode_queries,
    merge_launch,
    split_size,
)
from pageray.kernels.gpu.paged_prefill import prefill_launch
from pageray.kernels.gpu.precision import common_dtype
from pageray.kernels.ops import AttentionOptions, RaggedBatch


def paged_attention(
    q_THD: Tensor, kv_B2KPD: Tensor, batch: RaggedBatch, options: AttentionOptions
) -> Tensor:
    """A new contiguous [T, H, D] tensor of q's dtype; `Ops.paged_attention` has the contract."""
    _check(q_THD, kv_B2KPD, batch, options.sinks_H)
    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    for launch in attention_launches(q_THD, kv_B2KPD, batch, out_THD, options):
        run(launch)
    return out_THD


def attention_launches(
    q_THD: Tensor,
    kv_B2KPD: Tensor,
    batch: RaggedBatch,
    out_THD: Tensor,
    options: AttentionOptions,
) -> list[Launch]:
    """What fills out_THD: decode and merge, or prefill, or all three."""
    num_tokens, num_heads, head_dim = q_THD.shape
    num_sequences = batch.kv_lens_S.shape[0]
    most = max_decode_queries(
        num_heads // kv_B2KPD.shape[2], head_dim, common_dtype(q_THD, kv_B2KPD).itemsize
    )
    has_prefill = batch.max_query_len > most
    # Beside prefills only single queries count as decodes: it keeps the partials small.
    decode_queries = 1 if has_prefill else batch.max_query_len
    launches: list[Launch] = []
    # When every sequence has the maximum, a batch with prefills has nothing else.
    if not has_prefill or num_tokens < num_sequences * batch.max_query_len:
        num_splits = triton.cdiv(batch.max_kv_len, split_size(batch.max_kv_len))
        partials = empty_partials(q_THD, num_sequences, decode_queries, num_splits)
        launches.append(decode_launch(q_THD, kv_B2KPD, batch, partials, options))
        launches.append(merge_launch(partials, batch, out_THD, options))
    if has_prefill:
        launches.append(
            prefill_launch(q_THD, kv_B2KPD, batch, out_THD, options, min_queries=decode_queries + 1)
        )
    return launches


def _check(q_THD: Tensor, kv_B2KPD: Tensor, batch: RaggedBatch, sinks_H: Tensor | None) -> None:
    check_kv_layer(kv_B2KPD)
    check_dtype("q_THD", q_THD)
    check_ndim("q_THD", q_THD, 3)
    check_last_dim_contiguous("q_THD", q_THD)
    _, num_heads, head_dim = q_THD.shape
    num_kv_heads, block_size, kv_head_dim = kv_B2KPD.shape[2:]
    if kv_head_dim != head_dim or head_dim > MAX_HEAD_DIM:
        raise ValueError(
            f"Head dims: q has {head_dim}, the pool {kv_head_dim}; they must be equal and at most "
            f"{MAX_HEAD_DIM}."
        )
    if num_heads % num_kv_heads:
        raise ValueError(
            f"{num_heads} query heads cannot share {num_kv_heads} KV heads evenly; the second "
            "must divide the first."
        )
    if block_size > MAX_BLOCK_SIZE:
        raise ValueError(f"The block size is {block_size}; the largest is {MAX_BLOCK_SIZE}.")
    if sinks_H is not None:
        check_vector("sinks_H", sinks_H, num_heads, torch.float32)
    _check_batch(batch)


def _check_batch(batch: RaggedBatch) -> None:
    num_sequences = batch.kv_lens_S.shape[0]
    check_vector("kv_lens_S", batch.kv_lens_S, num_sequences, torch.int32)
    check_vector("query_starts_S1", batch.query_starts_S1, num_sequences + 1, torch.int32)
    tables = batch.block_tables_SN
    check_dtype("block_tables_SN", tables, (torch.int32,))
    check_shape("block_tables_SN", tables, (num_sequences, tables.shape[-1]))
    check_contiguous("block_tables_SN", tables)
    if tables.shape[1] == 0 and num_sequences:
        raise ValueError("block_tables_SN is 0 wide; every sequence has at least one block.")
