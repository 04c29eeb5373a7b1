"""Compiles what an engine will call, before its first request has to wait for it."""

import pathlib
from dataclasses import dataclass
from typing import cast

import torch
from numba.core import config, event

from pageray.kernels.cpu.draw_uniform import draw_uniform
from pageray.kernels.cpu.jit import MIN_WORK_PER_THREAD
from pageray.kernels.cpu.matrix_tile import MATRIX_DEPTH
from pageray.kernels.cpu.penalties import apply_penalties
from pageray.kernels.cpu.sample import sample
from pageray.kernels.ops import (
    AttentionBlock,
    AttentionOptions,
    AttentionWeights,
    MlpBlock,
    MlpWeights,
    Ops,
    PenaltyRows,
    RaggedBatch,
    RopeStep,
    SamplingRows,
)

_WIDTH = 2 * MATRIX_DEPTH
"""Of the layer that is run: one that matrix registers take, as those of models are."""


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """What the kernels of a decoder layer are compiled for, and the heads of a rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype


def is_cold() -> bool:
    """Whether nothing is compiled yet on this machine, for these sources."""
    folder = pathlib.Path(cast("str", vars(config)["CACHE_DIR"]))
    return not folder.is_dir() or not any(folder.iterdir())


def warm_up(ops: Ops, shape: LayerShape) -> bool:
    """Run what an engine calls once on made-up data: one token, and enough for several threads.
    Returns whether anything had to be compiled; later processes find it on disk.

    Compiling takes about a minute, loading well under a second.
    """
    with event.install_recorder("numba:compile") as recorder:
        for num_tokens in (1, 2 * MIN_WORK_PER_THREAD // shape.head_dim + 1):
            _run_layer(ops, shape, num_tokens)
            _run_sampler(num_rows=2, vocab_size=num_tokens * shape.head_dim)
        return len(cast("list[object]", recorder.buffer)) > 0


def _run_layer(ops: Ops, shape: LayerShape, num_tokens: int) -> None:
    """A layer, a head with a vocabulary as large as the number of tokens, and a copy of blocks."""
    head_dim, dtype = shape.head_dim, shape.dtype
    weight_E = torch.ones(_WIDTH, dtype=dtype)
    x_TE = torch.zeros(num_tokens, _WIDTH, dtype=dtype)
    residual_TE = x_TE.clone()
    num_blocks = (num_tokens + shape.block_size - 1) // shape.block_size
    record = (2, shape.num_kv_heads, shape.block_size, head_dim)
    pool = torch.zeros(num_blocks + 1, *record, dtype=shape.kv_dtype)
    targets_C = torch.arange(1, num_blocks + 1)
    ops.copy_blocks(pool, torch.stack((torch.zeros_like(targets_C), targets_C), dim=1))
    positions_T = torch.arange(num_tokens)
    rope = RopeStep(
        positions_T=positions_T,
        cos_sin_LD=torch.zeros(num_tokens, head_dim),
        slot_mapping_T=positions_T,
    )
    batch = RaggedBatch(
        query_starts_S1=torch.tensor([0, num_tokens], dtype=torch.int32),
        kv_lens_S=torch.tensor([num_tokens], dtype=torch.int32),
        block_tables_SN=torch.arange(num_blocks, dtype=torch.int32).unsqueeze(0),
        max_query_len=num_tokens,
        max_kv_len=num_tokens,
    )
    x_TE = _attention_block(ops, shape)(x_TE, residual_TE, pool, rope, batch)
    x_TE = _mlp_block(ops, shape)(x_TE, residual_TE)
    ops.pack_linear(torch.zeros(num_tokens, _WIDTH, dtype=dtype), None)(
        ops.add_rms_norm(x_TE, residual_TE, weight_E, 1e-5)
    )


def _attention_block(ops: Ops, shape: LayerShape) -> AttentionBlock:
    head_dim, dtype = shape.head_dim, shape.dtype
    num_all_heads = shape.num_heads + 2 * shape.num_kv_heads
    return ops.pack_attention(
        AttentionWeights(
            norm_E=torch.ones(_WIDTH, dtype=dtype),
            eps=1e-5,
            qkv_OE=torch.zeros(num_all_heads * head_dim, _WIDTH, dtype=dtype),
            qkv_bias_O=None,
            qk_norm=None,
            o_EO=torch.zeros(_WIDTH, shape.num_heads * head_dim, dtype=dtype),
            o_bias_E=None,
            head_dim=head_dim,
            options=AttentionOptions(scale=1.0),
        )
    )


def _mlp_block(ops: Ops, shape: LayerShape) -> MlpBlock:
    dtype = shape.dtype
    return ops.pack_mlp(
        MlpWeights(
            norm_E=torch.ones(_WIDTH, dtype=dtype),
            eps=1e-5,
            gate_up_2IE=torch.zeros(2 * _WIDTH, _WIDTH, dtype=dtype),
            gate_up_bias_2I=None,
            down_EI=torch.zeros(_WIDTH, _WIDTH, dtype=dtype),
            down_bias_E=None,
        )
    )


def _run_sampler(num_rows: int, vocab_size: int) -> None:
    logits_RV = torch.zeros(num_rows, vocab_size)
    index_R = torch.arange(num_rows)
    ones_R, zeros_R = torch.ones(num_rows), torch.zeros(num_rows)
    apply_penalties(
        logits_RV,
        PenaltyRows(
            rows_R=index_R,
            history_N=torch.zeros(num_rows, dtype=torch.int64),
            starts_R1=torch.arange(num_rows + 1),
            prompt_lens_R=index_R,
            repetition_R=ones_R,
            presence_R=zeros_R,
            frequency_R=zeros_R,
        ),
    )
    rows = SamplingRows(
        temperature_R=ones_R,
        top_k_R=torch.ones(num_rows, dtype=torch.int32),
        top_p_R=ones_R,
        min_p_R=zeros_R,
        uniform_R=draw_uniform(index_R, index_R, index_R),
    )
    sample(logits_RV, rows)
