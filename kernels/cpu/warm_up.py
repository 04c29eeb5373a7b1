"""Compiles what an engine will call, before its first request has to wait for it."""

import pathlib
from typing import cast

import torch
from numba.core import config, event

from pageray.kernels.cpu.copy_blocks import copy_blocks
from pageray.kernels.cpu.draw_uniform import draw_uniform
from pageray.kernels.cpu.jit import MIN_WORK_PER_THREAD
from pageray.kernels.cpu.linear import MAX_PANEL_ROWS, pack_linear
from pageray.kernels.cpu.mlp import pack_mlp
from pageray.kernels.cpu.paged_attention import paged_attention
from pageray.kernels.cpu.penalties import apply_penalties
from pageray.kernels.cpu.rms_norm import add_rms_norm, rms_norm
from pageray.kernels.cpu.rope_write_kv import rope_write_kv
from pageray.kernels.cpu.sample import sample
from pageray.kernels.ops import (
    AttentionOptions,
    KvScales,
    PenaltyRows,
    RaggedBatch,
    RopeStep,
    SamplingRows,
)


def is_cold() -> bool:
    """Whether nothing is compiled yet on this machine, for these sources."""
    folder = pathlib.Path(cast("str", vars(config)["CACHE_DIR"]))
    return not folder.is_dir() or not any(folder.iterdir())


def warm_up(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> bool:
    """Run every operation once on made-up data, for one thread and, if torch has several, for
    them too. Returns whether anything had to be compiled; later processes find it on disk.

    Compiling takes about a minute, loading well under a second. The pool is taken to have `dtype`.
    """
    with event.install_recorder("numba:compile") as recorder:
        sizes = [1]
        if torch.get_num_threads() > 1:
            sizes.append(2 * MIN_WORK_PER_THREAD // head_dim + 1)
        for num_tokens in sizes:
            _run_layer(num_tokens, (num_heads, num_kv_heads, head_dim, block_size), dtype)
            _run_sampler(num_rows=2, vocab_size=num_tokens * head_dim)
        return len(cast("list[object]", recorder.buffer)) > 0


def _run_layer(num_tokens: int, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    num_heads, num_kv_heads, head_dim, block_size = shape
    x_TE = torch.zeros(num_tokens, head_dim, dtype=dtype)
    weight_E = torch.ones(head_dim, dtype=dtype)
    add_rms_norm(x_TE, x_TE.clone(), weight_E, 1e-5)
    rms_norm(x_TE, weight_E, 1e-5)
    _run_products(num_tokens * head_dim, dtype)

    num_blocks = (num_tokens + block_size - 1) // block_size
    pool = torch.zeros(num_blocks + 1, 2, num_kv_heads, block_size, head_dim, dtype=dtype)
    targets_C = torch.arange(1, num_blocks + 1)
    copy_blocks(pool, torch.stack((torch.zeros_like(targets_C), targets_C), dim=1))
    qkv_TAD = torch.zeros(num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    positions_T = torch.arange(num_tokens)
    step = RopeStep(
        positions_T=positions_T,
        cos_sin_LD=torch.zeros(num_tokens, head_dim),
        slot_mapping_T=positions_T,
    )
    q_THD = rope_write_kv(qkv_TAD, pool, step, None, KvScales())
    batch = RaggedBatch(
        query_starts_S1=torch.tensor([0, 1], dtype=torch.int32),
        kv_lens_S=torch.tensor([num_tokens], dtype=torch.int32),
        block_tables_SN=torch.arange(num_blocks, dtype=torch.int32).unsqueeze(0),
        max_query_len=1,
        max_kv_len=num_tokens,
    )
    paged_attention(q_THD[:1], pool, batch, AttentionOptions(scale=1.0))


def _run_products(num_inputs: int, dtype: torch.dtype) -> None:
    weight_OE = torch.zeros(1, num_inputs, dtype=dtype)
    x_TE = torch.zeros(1, num_inputs, dtype=dtype)
    pack_linear(weight_OE, None)(x_TE)
    mlp = pack_mlp(torch.zeros(2, num_inputs, dtype=dtype), None, weight_OE.T, None)
    for num_tokens in (1, MAX_PANEL_ROWS + 1):
        mlp(x_TE.expand(num_tokens, num_inputs))


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
