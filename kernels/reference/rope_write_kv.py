"""The q/k norm, RoPE and the KV write of one layer, one after the other."""

from torch import Tensor

from pageray.kernels.ops import KvScales, QkNorm, RopeStep
from pageray.kernels.reference.rms_norm import rms_norm
from pageray.kernels.reference.rope import apply_rope
from pageray.kernels.reference.write_kv import write_kv


def rope_write_kv(
    qkv_TAD: Tensor, kv_B2KPD: Tensor, step: RopeStep, norm: QkNorm | None, scales: KvScales
) -> Tensor:
    """q_THD, the rotated query heads of qkv; K and V are in the pool."""
    num_kv_heads = kv_B2KPD.shape[2]
    num_heads = qkv_TAD.shape[1] - 2 * num_kv_heads
    q_THD, k_TKD, v_TKD = qkv_TAD.split_with_sizes([num_heads, num_kv_heads, num_kv_heads], dim=1)
    k_TKD = k_TKD.clone()
    if norm is not None:
        q_THD.copy_(rms_norm(q_THD, norm.q_norm_D, norm.eps))
        k_TKD = rms_norm(k_TKD, norm.k_norm_D, norm.eps)
    apply_rope(q_THD, step.positions_T, step.cos_sin_LD)
    apply_rope(k_TKD, step.positions_T, step.cos_sin_LD)
    write_kv(k_TKD, v_TKD, kv_B2KPD, step.slot_mapping_T, scales)
    return q_THD
