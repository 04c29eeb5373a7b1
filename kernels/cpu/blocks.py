"""A decoder layer's two blocks on packed weights."""

from pageray.kernels.cpu.attention_block import FusedAttention
from pageray.kernels.cpu.mlp import FusedMlp
from pageray.kernels.cpu.packed_weight import pack_weight, pack_weight_int8
from pageray.kernels.ops import AttentionBlock, AttentionWeights, MlpBlock, MlpWeights


def pack_attention(weights: AttentionWeights) -> AttentionBlock:
    """Raises ValueError if shapes do not fit. Only packed forms are kept."""
    return FusedAttention(weights, pack_weight)


def pack_mlp(weights: MlpWeights) -> MlpBlock:
    """Raises ValueError if shapes do not fit. Only packed forms are kept."""
    return FusedMlp(weights, pack_weight)


def pack_attention_int8(weights: AttentionWeights) -> AttentionBlock:
    """Like `pack_attention`, with weights of 8 bits and a scale per output."""
    return FusedAttention(weights, pack_weight_int8)


def pack_mlp_int8(weights: MlpWeights) -> MlpBlock:
    """Like `pack_mlp`, with weights of 8 bits and a scale per output."""
    return FusedMlp(weights, pack_weight_int8)
