"""Rotary position embedding in half-split (NeoX) pairs (Su et al. 2021, arXiv:2104.09864).

With c, s the cosine and sine of position p and pair i, and R rotated dims:
    y[i] = x[i] c - x[i + R/2] s,    y[i + R/2] = x[i + R/2] c + x[i] s.

Shapes: q_THD, k_TKD in place, maybe strided views; cos_sin_LD [max position, R], cosines first.
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
    check_last_dim_contiguous,
    check_ndim,
    check_shape,
    check_vector,
)
from pageray.kernels.gpu.launch import Launch, run
from pageray.kernels.gpu.precision import round_to

_TILE_ELEMENTS = 1024
"""Pairs per program: some heads of one token."""


@triton.jit
def _rotate(x_ptr, tile, num_heads, stride_H, cos_I, sin_I, i_I, HALF, BLOCK_H: tl.constexpr):
    h_H = tile * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_HI = (h_H < num_heads)[:, None] & (i_I < HALF)[None, :]
    low_ptr = x_ptr + h_H[:, None] * stride_H + i_I[None, :]
    low_HI = tl.load(low_ptr, mask=mask_HI, other=0.0).to(tl.float32)
    high_HI = tl.load(low_ptr + HALF, mask=mask_HI, other=0.0).to(tl.float32)
    new_low_HI = low_HI * cos_I[None, :] - high_HI * sin_I[None, :]
    new_high_HI = high_HI * cos_I[None, :] + low_HI * sin_I[None, :]
    tl.store(low_ptr, round_to(new_low_HI, x_ptr.dtype.element_ty), mask=mask_HI)
    tl.store(low_ptr + HALF, round_to(new_high_HI, x_ptr.dtype.element_ty), mask=mask_HI)


# Grid: (T, cdiv(H, BLOCK_H) + cdiv(K, BLOCK_H)): the first tiles of a token are q's, then k's.
@triton.jit
def rope_kernel(
    q_ptr,
    k_ptr,
    positions_ptr,
    cos_sin_ptr,
    stride_q_T,
    stride_q_H,
    stride_k_T,
    stride_k_K,
    H: tl.constexpr,
    K: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    Q_TILES: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    i_I = tl.arange(0, BLOCK_I)
    row_ptr = cos_sin_ptr + tl.load(positions_ptr + token) * (2 * HALF)
    cos_I = tl.load(row_ptr + i_I, mask=i_I < HALF, other=0.0)
    sin_I = tl.load(row_ptr + HALF + i_I, mask=i_I < HALF, other=0.0)
    if tile < Q_TILES:
        _rotate(q_ptr + token * stride_q_T, tile, H, stride_q_H, cos_I, sin_I, i_I, HALF, BLOCK_H)
    else:
        tile -= Q_TILES
        _rotate(k_ptr + token * stride_k_T, tile, K, stride_k_K, cos_I, sin_I, i_I, HALF, BLOCK_H)


def rope_launch(q_THD: Tensor, k_TKD: Tensor, positions_T: Tensor, cos_sin_LD: Tensor) -> Launch:
    """Rotate q and k in place."""
    num_tokens, num_heads, _ = q_THD.shape
    num_kv_heads = k_TKD.shape[1]
    half = cos_sin_LD.shape[1] // 2
    block_half = triton.next_power_of_2(half)
    block_heads = max(1, _TILE_ELEMENTS // block_half)
    # No larger than the heads there are: a tile of q and one of k must not be mostly padding.
    block_heads = min(block_heads, triton.next_power_of_2(num_heads))
    tiles = triton.cdiv(num_heads, block_heads) + triton.cdiv(num_kv_heads, block_heads)
    return Launch(
        kernel=rope_kernel,
        grid=(num_tokens, tiles),
        args={
            "q_ptr": q_THD,
            "k_ptr": k_TKD,
            "positions_ptr": positions_T,
            "cos_sin_ptr": cos_sin_LD,
            "stride_q_T": q_THD.stride(0),
            "stride_q_H": q_THD.stride(1),
            "stride_k_T": k_TKD.stride(0),
            "stride_k_K": k_TKD.stride(1),
        },
        constants={
            "H": num_heads,
            "K": num_kv_heads,
            "HALF": half,
            "BLOCK_H": block_heads,
            "BLOCK_I": block_half,
        },
    )


def apply_rope(q_THD: Tensor, k_TKD: Tensor, positions_T: Tensor, cos_sin_LD: Tensor) -> None:
    """Rotate the first R = cos_sin_LD.shape[1] dims of q and k in place; the rest stays.

    Every position must be below cos_sin_LD.shape[0]; the kernel cannot tell.
    """
    for name, x_THD in (("q_THD", q_THD), ("k_TKD", k_TKD)):
        check_dtype(name, x_THD)
        check_ndim(name, x_THD, 3)
        check_last_dim_contiguous(name, x_THD)
    num_tokens, _, head_dim = q_THD.shape
    check_shape("k_TKD", k_TKD, (num_tokens, k_TKD.shape[1], head_dim))
    check_vector("positions_T", positions_T, num_tokens, torch.int64)
    check_dtype("cos_sin_LD", cos_sin_LD, (torch.float32,))
    check_ndim("cos_sin_LD", cos_sin_LD, 2)
    check_contiguous("cos_sin_LD", cos_sin_LD)
    width = cos_sin_LD.shape[1]
    if width % 2 or width > head_dim:
        raise ValueError(
            f"cos_sin_LD is {width} wide; it must be even and at most the head dim {head_dim}."
        )
    run(rope_launch(q_THD, k_TKD, positions_T, cos_sin_LD))
