"""K and V of the step's tokens go to their token slots.

Shapes: k_TKD, v_TKD; kv_B2KPD one layer of the pool, plane 0 K and plane 1 V, with contiguous
[P, D] tiles; slot_mapping_T int64: token t goes to slot s % P of block s // P, s = -1 skips it.
Stored is k / k_scale and v / v_scale, rounded to the pool's dtype.
"""

# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# Reason: values inside a @triton.jit function have no Python types.

import torch
import triton
import triton.language as tl
from torch import Tensor

from pageray.kernels.gpu.checks import (
    check_dtype,
    check_kv_layer,
    check_last_dim_contiguous,
    check_shape,
    check_vector,
)
from pageray.kernels.gpu.launch import Launch, run
from pageray.kernels.gpu.precision import round_to
from pageray.kernels.ops import check_kv_scales

_TILE_ELEMENTS = 1024
"""Elements of K, and as many of V, that one program moves."""


# Grid: (T, cdiv(K, BLOCK_K)). One program writes some heads of one token, K and V.
@triton.jit
def write_kv_kernel(
    k_ptr,
    v_ptr,
    kv_ptr,
    slot_mapping_ptr,
    k_scale,
    v_scale,
    stride_k_T,
    stride_k_K,
    stride_v_T,
    stride_v_K,
    stride_kv_B,
    stride_kv_2,
    stride_kv_K,
    K: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if slot < 0:
        return
    head_K1 = (tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K))[:, None]
    d_1D = tl.arange(0, BLOCK_D)[None, :]
    mask_KD = (head_K1 < K) & (d_1D < D)
    # The slot is 64 bits wide, and so is the offset: a pool has more than 2^31 elements.
    page_ptr = kv_ptr + (slot // P) * stride_kv_B + (slot % P) * D
    k_KD = tl.load(k_ptr + token * stride_k_T + head_K1 * stride_k_K + d_1D, mask=mask_KD)
    v_KD = tl.load(v_ptr + token * stride_v_T + head_K1 * stride_v_K + d_1D, mask=mask_KD)
    k_KD = round_to(tl.div_rn(k_KD.to(tl.float32), k_scale), kv_ptr.dtype.element_ty)
    v_KD = round_to(tl.div_rn(v_KD.to(tl.float32), v_scale), kv_ptr.dtype.element_ty)
    tile_ptr = page_ptr + head_K1 * stride_kv_K + d_1D
    tl.store(tile_ptr, k_KD, mask=mask_KD)
    tl.store(tile_ptr + stride_kv_2, v_KD, mask=mask_KD)


def write_kv_launch(
    k_TKD: Tensor,
    v_TKD: Tensor,
    kv_B2KPD: Tensor,
    slot_mapping_T: Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Launch:
    """Scatter k and v into the pool."""
    num_tokens, num_kv_heads, head_dim = k_TKD.shape
    block_dim = triton.next_power_of_2(head_dim)
    block_heads = min(triton.next_power_of_2(num_kv_heads), max(1, _TILE_ELEMENTS // block_dim))
    return Launch(
        kernel=write_kv_kernel,
        grid=(num_tokens, triton.cdiv(num_kv_heads, block_heads)),
        args={
            "k_ptr": k_TKD,
            "v_ptr": v_TKD,
            "kv_ptr": kv_B2KPD,
            "slot_mapping_ptr": slot_mapping_T,
            "k_scale": k_scale,
            "v_scale": v_scale,
            "stride_k_T": k_TKD.stride(0),
            "stride_k_K": k_TKD.stride(1),
            "stride_v_T": v_TKD.stride(0),
            "stride_v_K": v_TKD.stride(1),
            "stride_kv_B": kv_B2KPD.stride(0),
            "stride_kv_2": kv_B2KPD.stride(1),
            "stride_kv_K": kv_B2KPD.stride(2),
        },
        constants={
            "K": num_kv_heads,
            "P": kv_B2KPD.shape[3],
            "D": head_dim,
            "BLOCK_K": block_heads,
            "BLOCK_D": block_dim,
        },
    )


def write_kv(
    k_TKD: Tensor,
    v_TKD: Tensor,
    kv_B2KPD: Tensor,
    slot_mapping_T: Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Write K and V into kv_B2KPD; `WriteKv` has the contract.

    Every slot must be below B * P; the kernel cannot tell.
    """
    check_kv_scales(k_scale, v_scale)
    check_kv_layer(kv_B2KPD)
    num_kv_heads, head_dim = kv_B2KPD.shape[2], kv_B2KPD.shape[4]
    for name, x_TKD in (("k_TKD", k_TKD), ("v_TKD", v_TKD)):
        check_dtype(name, x_TKD)
        check_shape(name, x_TKD, (k_TKD.shape[0], num_kv_heads, head_dim))
        check_last_dim_contiguous(name, x_TKD)
    check_vector("slot_mapping_T", slot_mapping_T, k_TKD.shape[0], torch.int64)
    run(write_kv_launch(k_TKD, v_TKD, kv_B2KPD, slot_mapping_T, k_scale=k_scale, v_scale=v_scale))
