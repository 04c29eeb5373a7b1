"""A decoder layer's two blocks as one operation after the other, for backends that fuse no more."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from pageray.kernels.ops import (
    AttentionBlock,
    AttentionOptions,
    AttentionWeights,
    KvScales,
    Linear,
    MlpBlock,
    MlpWeights,
    QkNorm,
    RaggedBatch,
    RopeStep,
)


@dataclass(frozen=True, kw_only=True)
class Operations:
    """What the blocks are made of; `Ops` has the contracts."""

    pack_linear: Callable[[Tensor, Tensor | None], Linear]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    rope_write_kv: Callable[[Tensor, Tensor, RopeStep, QkNorm | None, KvScales], Tensor]
    paged_attention: Callable[[Tensor, Tensor, RaggedBatch, AttentionOptions], Tensor]
    silu_mul: Callable[[Tensor], Tensor]

    def pack_attention(self, weights: AttentionWeights) -> AttentionBlock:
        """`Ops.pack_attention`."""
        return _Attention(self, weights)

    def pack_mlp(self, weights: MlpWeights) -> MlpBlock:
        """`Ops.pack_mlp`."""
        gate_up = self.pack_linear(weights.gate_up_2IE, weights.gate_up_bias_2I)
        down = self.pack_linear(weights.down_EI, weights.down_bias_E)
        norm_E, eps = weights.norm_E, weights.eps

        def mlp(x_TE: Tensor, residual_TE: Tensor) -> Tensor:
            normed_TE = self.add_rms_norm(x_TE, residual_TE, norm_E, eps)
            return down(self.silu_mul(gate_up(normed_TE)))

        return mlp


class _Attention:
    def __init__(self, ops: Operations, weights: AttentionWeights) -> None:
        self._ops = ops
        self._norm_E, self._eps = weights.norm_E, weights.eps
        self._qkv = ops.pack_linear(weights.qkv_OE, weights.qkv_bias_O)
        self._qk_norm = weights.qk_norm
        self._o = ops.pack_linear(weights.o_EO, weights.o_bias_E)
        self._head_dim = weights.head_dim
        self._options = weights.options
        self._scales = KvScales(k_scale=weights.options.k_scale, v_scale=weights.options.v_scale)

    def __call__(
        self,
        x_TE: Tensor | None,
        residual_TE: Tensor,
        kv_B2KPD: Tensor,
        rope: RopeStep,
        batch: RaggedBatch,
    ) -> Tensor:
        ops = self._ops
        if x_TE is None:
            normed_TE = ops.rms_norm(residual_TE, self._norm_E, self._eps)
        else:
            normed_TE = ops.add_rms_norm(x_TE, residual_TE, self._norm_E, self._eps)
        qkv_TAD = self._qkv(normed_TE).view(residual_TE.shape[0], -1, self._head_dim)
        q_THD = ops.rope_write_kv(qkv_TAD, kv_B2KPD, rope, self._qk_norm, self._scales)
        out_THD = ops.paged_attention(q_THD, kv_B2KPD, batch, self._options)
        return self._o(out_THD.flatten(1))
