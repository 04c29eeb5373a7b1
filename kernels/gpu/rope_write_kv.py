"""The q/k norm, RoPE and the KV write of one layer, in one pass over the fused projection.

`turn_heads.py` has the formulas. Shapes: qkv_TAD, A = H query, K key and K value heads; kv_B2KPD
one layer of the pool; in the kernel h is a tile of heads.
"""

# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# Reason: values inside a @triton.jit function have no Python types.

import torch
import triton
import triton.language as tl
from torch import Tensor

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
from pageray.kernels.gpu.quantise import quantise
from pageray.kernels.gpu.turn_heads import load_float, store_heads, turn_heads
from pageray.kernels.ops import KvScales, QkNorm, RopeStep

_TILE_ELEMENTS = 1024
"""Of q or k, and as many of v, that one program moves: some heads of one token."""


# Grid: (T, cdiv(H, BLOCK_HEADS) + cdiv(K, BLOCK_HEADS)): the first tiles of a token are q's, the others
# take k and v of the same heads.
@triton.jit
def rope_write_kv_kernel(
    qkv_ptr,
    kv_ptr,
    positions_ptr,
    cos_sin_ptr,
    slot_mapping_ptr,
    q_norm_ptr,
    k_norm_ptr,
    stride_qkv_T,
    stride_qkv_A,
    stride_kv_B,
    stride_kv_2,
    stride_kv_K,
    eps,
    k_scale,
    v_scale,
    H: tl.constexpr,
    K: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    Q_TILES: tl.constexpr = (H + BLOCK_HEADS - 1) // BLOCK_HEADS
    token_ptr = qkv_ptr + token * stride_qkv_T
    angles_ptr = cos_sin_ptr + tl.load(positions_ptr + token) * (2 * HALF)
    head_h1 = tl.arange(0, BLOCK_HEADS)[:, None]
    if tile < Q_TILES:
        head_h1 += tile * BLOCK_HEADS
        q_ptr = token_ptr + head_h1 * stride_qkv_A
        is_head_h1 = head_h1 < H
        low_hI, high_hI, rest_hJ = turn_heads(
            q_ptr, q_norm_ptr, eps, angles_ptr, is_head_h1, D, HALF, BLOCK_I, BLOCK_J, HAS_NORM
        )
        store_heads(q_ptr, low_hI, high_hI, rest_hJ, None, is_head_h1, D, HALF, BLOCK_I, BLOCK_J)
    else:
        slot = tl.load(slot_mapping_ptr + token)
        if slot >= 0:
            head_h1 += (tile - Q_TILES) * BLOCK_HEADS
            is_head_h1 = head_h1 < K
            # The slot is 64 bits wide, and so is the offset: a pool has more than 2^31 elements.
            page_ptr = kv_ptr + (slot // P) * stride_kv_B + (slot % P) * D
            place_ptr = page_ptr + head_h1 * stride_kv_K
            k_ptr = token_ptr + (H + head_h1) * stride_qkv_A
            low_hI, high_hI, rest_hJ = turn_heads(
                k_ptr, k_norm_ptr, eps, angles_ptr, is_head_h1, D, HALF, BLOCK_I, BLOCK_J, HAS_NORM
            )
            store_heads(
                place_ptr, low_hI, high_hI, rest_hJ, k_scale, is_head_h1, D, HALF, BLOCK_I, BLOCK_J
            )
            d_1D = tl.arange(0, BLOCK_D)[None, :]
            mask_hD = is_head_h1 & (d_1D < D)
            v_hD = load_float(k_ptr + K * stride_qkv_A + d_1D, mask_hD)
            v_hD = quantise(v_hD, v_scale, kv_ptr.dtype.element_ty)
            tl.store(place_ptr + stride_kv_2 + d_1D, v_hD, mask=mask_hD)


def rope_write_kv_launch(
    qkv_TAD: Tensor, kv_B2KPD: Tensor, step: RopeStep, norm: QkNorm | None, scales: KvScales
) -> Launch:
    """Rotate q in place; normalise, rotate and scatter k; scatter v."""
    num_tokens, num_all_heads, head_dim = qkv_TAD.shape
    num_kv_heads, block_size = kv_B2KPD.shape[2:4]
    num_heads = num_all_heads - 2 * num_kv_heads
    half = step.cos_sin_LD.shape[1] // 2
    block_dim = triton.next_power_of_2(head_dim)
    # No larger than the heads there are: a tile of q and one of k must not be mostly padding.
    block_heads = min(max(1, _TILE_ELEMENTS // block_dim), triton.next_power_of_2(num_heads))
    return Launch(
        kernel=rope_write_kv_kernel,
        grid=(
            num_tokens,
            triton.cdiv(num_heads, block_heads) + triton.cdiv(num_kv_heads, block_heads),
        ),
        args={
            "qkv_ptr": qkv_TAD,
            "kv_ptr": kv_B2KPD,
            "positions_ptr": step.positions_T,
            "cos_sin_ptr": step.cos_sin_LD,
            "slot_mapping_ptr": step.slot_mapping_T,
            # Without a norm the kernel never looks at the weights.
            "q_norm_ptr": qkv_TAD if norm is None else norm.q_norm_D,
            "k_norm_ptr": qkv_TAD if norm is None else norm.k_norm_D,
            "stride_qkv_T": qkv_TAD.stride(0),
            "stride_qkv_A": qkv_TAD.stride(1),
            "stride_kv_B": kv_B2KPD.stride(0),
            "stride_kv_2": kv_B2KPD.stride(1),
            "stride_kv_K": kv_B2KPD.stride(2),
            "eps": 0.0 if norm is None else norm.eps,
            "k_scale": scales.k_scale,
            "v_scale": scales.v_scale,
        },
        constants={
            "H": num_heads,
            "K": num_kv_heads,
            "P": block_size,
            "D": head_dim,
            "HALF": half,
            "HAS_NORM": norm is not None,
            "BLOCK_HEADS": block_heads,
            "BLOCK_I": triton.next_power_of_2(half),
            "BLOCK_J": triton.next_power_of_2(max(1, head_dim - 2 * half)),
            "BLOCK_D": block_dim,
        },
    )


def rope_write_kv(
    qkv_TAD: Tensor, kv_B2KPD: Tensor, step: RopeStep, norm: QkNorm | None, scales: KvScales
) -> Tensor:
    """q_THD, the rotated query heads of qkv; `Ops.rope_write_kv` has the contract.

    Every slot must be below B * P and every position below the table's length; the kernel cannot
    tell.
    """
    check_kv_layer(kv_B2KPD)
    _check_projection(qkv_TAD, kv_B2KPD)
    _check_step(step, qkv_TAD)
    for name, weight_D in _weights(norm):
        check_dtype(name, weight_D)
        check_shape(name, weight_D, (qkv_TAD.shape[2],))
        check_contiguous(name, weight_D)
    run(rope_write_kv_launch(qkv_TAD, kv_B2KPD, step, norm, scales))
    return qkv_TAD[:, : qkv_TAD.shape[1] - 2 * kv_B2KPD.shape[2]]


def _check_projection(qkv_TAD: Tensor, kv_B2KPD: Tensor) -> None:
    check_dtype("qkv_TAD", qkv_TAD)
    check_ndim("qkv_TAD", qkv_TAD, 3)
    check_last_dim_contiguous("qkv_TAD", qkv_TAD)
    num_tokens, num_all_heads, _ = qkv_TAD.shape
    check_shape("qkv_TAD", qkv_TAD, (num_tokens, num_all_heads, kv_B2KPD.shape[4]))
    if num_all_heads <= 2 * kv_B2KPD.shape[2]:
        raise ValueError(
            f"qkv_TAD has {num_all_heads} heads; with {kv_B2KPD.shape[2]} KV heads in the pool "
            "none is left for queries."
        )


def _check_step(step: RopeStep, qkv_TAD: Tensor) -> None:
    num_tokens, _, head_dim = qkv_TAD.shape
    check_vector("positions_T", step.positions_T, num_tokens, torch.int64)
    check_vector("slot_mapping_T", step.slot_mapping_T, num_tokens, torch.int64)
    check_dtype("cos_sin_LD", step.cos_sin_LD, (torch.float32,))
    check_ndim("cos_sin_LD", step.cos_sin_LD, 2)
    check_contiguous("cos_sin_LD", step.cos_sin_LD)
    width = step.cos_sin_LD.shape[1]
    if width % 2 or width > head_dim:
        raise ValueError(
            f"cos_sin_LD is {width} wide; it must be even and at most the head dim {head_dim}."
        )


def _weights(norm: QkNorm | None) -> tuple[tuple[str, Tensor], ...]:
    return () if norm is None else (("q_norm_D", norm.q_norm_D), ("k_norm_D", norm.k_norm_D))
