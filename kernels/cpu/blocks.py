"""A decoder layer's two blocks: fused on our panels, or composed where oneDNN does better."""

from torch import Tensor

from pageray.kernels.composed_blocks import Operations
from pageray.kernels.cpu.attention_block import fused_attention
from pageray.kernels.cpu.linear import MAX_PANEL_ROWS, multiplies_natively, pack_onednn_linear
from pageray.kernels.cpu.mlp import fused_mlp
from pageray.kernels.cpu.packed_weight import pack_weight, pack_weight_int8
from pageray.kernels.cpu.paged_attention import paged_attention
from pageray.kernels.cpu.rms_norm import add_rms_norm, rms_norm
from pageray.kernels.cpu.rope_write_kv import rope_write_kv
from pageray.kernels.cpu.silu_mul import silu_mul
from pageray.kernels.ops import (
    AttentionBlock,
    AttentionWeights,
    MlpBlock,
    MlpWeights,
    RaggedBatch,
    RopeStep,
)

_COMPOSED = Operations(
    pack_linear=pack_onednn_linear,
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    rope_write_kv=rope_write_kv,
    paged_attention=paged_attention,
    silu_mul=silu_mul,
)


def pack_attention(weights: AttentionWeights) -> AttentionBlock:
    """Raises ValueError if shapes do not fit. Only packed forms are kept."""
    few_rows = fused_attention(weights, pack_weight)
    if not multiplies_natively(weights.qkv_OE.dtype):
        return few_rows
    many_rows = _COMPOSED.pack_attention(weights)

    def attention(
        x_TE: Tensor | None,
        residual_TE: Tensor,
        kv_B2KPD: Tensor,
        rope: RopeStep,
        batch: RaggedBatch,
    ) -> Tensor:
        block = few_rows if residual_TE.shape[0] <= MAX_PANEL_ROWS else many_rows
        return block(x_TE, residual_TE, kv_B2KPD, rope, batch)

    return attention


def pack_mlp(weights: MlpWeights) -> MlpBlock:
    """Raises ValueError if shapes do not fit. Only packed forms are kept."""
    few_rows = fused_mlp(weights, pack_weight)
    if not multiplies_natively(weights.down_EI.dtype):
        return few_rows
    many_rows = _COMPOSED.pack_mlp(weights)

    def mlp(x_TE: Tensor, residual_TE: Tensor) -> Tensor:
        block = few_rows if residual_TE.shape[0] <= MAX_PANEL_ROWS else many_rows
        return block(x_TE, residual_TE)

    return mlp


def pack_attention_int8(weights: AttentionWeights) -> AttentionBlock:
    """Like `pack_attention`, with weights of 8 bits and a scale per output."""
    return fused_attention(weights, pack_weight_int8)


def pack_mlp_int8(weights: MlpWeights) -> MlpBlock:
    """Like `pack_mlp`, with weights of 8 bits and a scale per output."""
    return fused_mlp(weights, pack_weight_int8)
