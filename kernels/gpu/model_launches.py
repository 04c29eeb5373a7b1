"""One launch of every kernel at the head shapes of known models, on tensors without memory.

For `compile_report.py`: nothing here can run.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pageray.kernels.gpu.attention_variants import PLAIN, AttentionVariant
from pageray.kernels.gpu.copy_blocks import copy_blocks_launch
from pageray.kernels.gpu.draw_uniform import draw_uniform_launch
from pageray.kernels.gpu.gather_pages import gather_pages_launch, scatter_pages_launch
from pageray.kernels.gpu.launch import Launch
from pageray.kernels.gpu.paged_attention import attention_launches
from pageray.kernels.gpu.penalties import apply_penalties_launch, count_tokens_launch
from pageray.kernels.gpu.rms_norm import add_rms_norm_launch, rms_norm_launch
from pageray.kernels.gpu.rope_write_kv import rope_write_kv_launch
from pageray.kernels.gpu.sample import sample_launch
from pageray.kernels.gpu.silu_mul import silu_mul_launch
from pageray.kernels.ops import (
    AttentionOptions,
    KvScales,
    PenaltyRows,
    QkNorm,
    RaggedBatch,
    RopeStep,
    SamplingRows,
)

_TOKENS = 96
_SEQUENCES = 24
_KV_LEN = 4096


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What one rank sees of a model."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    vocab_size: int
    window: int = 0
    has_qk_norm: bool = False


LLAMA_3_8B = ModelShape(
    name="Llama-3-8B",
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    vocab_size=128256,
)
LLAMA_3_70B_TP8 = ModelShape(
    name="Llama-3-70B/TP8",
    num_heads=8,
    num_kv_heads=1,
    head_dim=128,
    hidden_size=8192,
    intermediate_size=3584,
    num_layers=80,
    vocab_size=128256,
)
QWEN3_32B_TP4 = ModelShape(
    name="Qwen3-32B/TP4",
    num_heads=16,
    num_kv_heads=2,
    head_dim=128,
    hidden_size=5120,
    intermediate_size=6400,
    num_layers=64,
    vocab_size=151936,
    has_qk_norm=True,
)
SMOLLM2_135M = ModelShape(
    name="SmolLM2-135M",
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    vocab_size=49152,
)
GEMMA_3_12B = ModelShape(
    name="Gemma-3-12B",
    num_heads=16,
    num_kv_heads=8,
    head_dim=256,
    hidden_size=3840,
    intermediate_size=15360,
    num_layers=48,
    vocab_size=262208,
    window=1024,
    has_qk_norm=True,
)
MODEL_SHAPES = (LLAMA_3_8B, LLAMA_3_70B_TP8, QWEN3_32B_TP4, SMOLLM2_135M, GEMMA_3_12B)

PHI_3_MINI = ModelShape(
    name="Phi-3-mini",
    num_heads=32,
    num_kv_heads=32,
    head_dim=96,
    hidden_size=3072,
    intermediate_size=8192,
    num_layers=32,
    vocab_size=32064,
)
_HEAD_DIM_192 = replace(LLAMA_3_8B, name="head dim 192", head_dim=192)
VARIANT_SHAPES = (SMOLLM2_135M, PHI_3_MINI, LLAMA_3_8B, _HEAD_DIM_192, GEMMA_3_12B)
"""One of every head dim."""


def launches_of(
    shape: ModelShape, dtype: torch.dtype, variant: AttentionVariant = PLAIN
) -> Iterator[Launch]:
    """One launch of every kernel at this shape, on tensors without memory; of a variant, of those
    that touch the pool."""
    if variant == PLAIN:
        yield from _layer_launches(shape, dtype)
        yield from _sampling_launches(shape)
    yield from _pool_launches(shape, dtype, variant)


def _layer_launches(shape: ModelShape, dtype: torch.dtype) -> Iterator[Launch]:
    x_TE = _meta((_TOKENS, shape.hidden_size), dtype)
    weight_E = _meta((shape.hidden_size,), dtype)
    yield add_rms_norm_launch(x_TE, x_TE, weight_E, x_TE, 1e-6)
    yield rms_norm_launch(x_TE, weight_E, x_TE, 1e-6)
    gate_up_T2I = _meta((_TOKENS, 2 * shape.intermediate_size), dtype)
    yield silu_mul_launch(gate_up_T2I, _meta((_TOKENS, shape.intermediate_size), dtype))


def _pool_launches(
    shape: ModelShape, dtype: torch.dtype, variant: AttentionVariant
) -> Iterator[Launch]:
    """Writing, copying and moving pages, and the attention of a mixed batch: decode, merge and
    prefill."""
    record = (shape.num_layers, 2, shape.num_kv_heads, variant.block_size, shape.head_dim)
    pool = _meta((1024, *record), variant.kv_dtype or dtype)
    kv_B2KPD = pool[:, 0]
    yield _rope_write_kv_launch(shape, kv_B2KPD, dtype)
    yield copy_blocks_launch(pool, _meta((3, 2)))
    # Half of the layers, one KV head: what a rank sends to one that holds other heads.
    blocks_N, pages = _meta((_SEQUENCES,)), pool[:, : shape.num_layers // 2, :, :1]
    staging = _meta((_SEQUENCES, *pages.shape[1:]), pool.dtype)
    yield gather_pages_launch(pages, staging, blocks_N)
    yield scatter_pages_launch(staging, pages, blocks_N)
    q_THD = _qkv(shape, dtype)[:, : shape.num_heads]
    batch = RaggedBatch(
        query_starts_S1=_meta((_SEQUENCES + 1,), torch.int32),
        kv_lens_S=_meta((_SEQUENCES,), torch.int32),
        block_tables_SN=_meta((_SEQUENCES, _KV_LEN // variant.block_size), torch.int32),
        max_query_len=_TOKENS - _SEQUENCES + 1,
        max_kv_len=_KV_LEN,
    )
    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    options = AttentionOptions(
        scale=shape.head_dim**-0.5,
        window=shape.window if variant.window is None else variant.window,
        softcap=variant.softcap,
        sinks_H=_meta((shape.num_heads,), torch.float) if variant.has_sinks else None,
    )
    yield from attention_launches(q_THD, kv_B2KPD, batch, out_THD, options)


def _sampling_launches(shape: ModelShape) -> Iterator[Launch]:
    rows = _SEQUENCES
    logits_RV = _meta((rows, shape.vocab_size), torch.float)
    ids_R, floats_R = _meta((rows,)), _meta((rows,), torch.float)
    penalties = PenaltyRows(
        rows_R=ids_R,
        history_N=_meta((1000,)),
        starts_R1=_meta((rows + 1,)),
        prompt_lens_R=ids_R,
        repetition_R=floats_R,
        presence_R=floats_R,
        frequency_R=floats_R,
    )
    counts_RV = _meta((rows, shape.vocab_size), torch.int32)
    yield count_tokens_launch(penalties, counts_RV)
    yield apply_penalties_launch(logits_RV, penalties, counts_RV)
    uniform_R = _meta((rows,), torch.double)
    yield draw_uniform_launch(ids_R, ids_R, ids_R, uniform_R)
    sampling = SamplingRows(
        temperature_R=floats_R,
        top_k_R=_meta((rows,), torch.int32),
        top_p_R=floats_R,
        min_p_R=floats_R,
        uniform_R=uniform_R,
    )
    yield sample_launch(logits_RV, sampling, ids_R)


def _meta(shape: tuple[int, ...], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _rope_write_kv_launch(shape: ModelShape, kv_B2KPD: Tensor, dtype: torch.dtype) -> Launch:
    step = RopeStep(
        positions_T=_meta((_TOKENS,)),
        cos_sin_LD=_meta((4096, shape.head_dim), torch.float),
        slot_mapping_T=_meta((_TOKENS,)),
    )
    weight_D = _meta((shape.head_dim,), dtype)
    norm = QkNorm(q_norm_D=weight_D, k_norm_D=weight_D, eps=1e-6) if shape.has_qk_norm else None
    return rope_write_kv_launch(_qkv(shape, dtype), kv_B2KPD, step, norm, KvScales())


def _qkv(shape: ModelShape, dtype: torch.dtype) -> Tensor:
    """The fused projection's output, [T, A, D]."""
    return _meta((_TOKENS, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim), dtype)
