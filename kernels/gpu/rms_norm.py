"""y = x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv:1910.07467).

Shapes: x [T, E], or [T, H, E] for the q/k norm, where a row is one head; weight_E. Rows may be
strided (a slice of a wider projection); the last dimension must be contiguous.
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
    check_last_dim_contiguous,
    check_shape,
)
from pageray.kernels.gpu.launch import Launch, run
from pageray.kernels.gpu.precision import FLOAT_DTYPES, round_to

_TILE_ELEMENTS = 2048
"""Short rows share a program, so that each has about this many elements to hide latency with."""


@triton.jit
def _normalise(x_RE, weight_ptr, e_E, E, eps):
    weight_E = tl.load(weight_ptr + e_E, mask=e_E < E, other=0.0).to(tl.float32)
    mean_square_R = tl.sum(x_RE * x_RE, axis=1) / E
    return x_RE * tl.rsqrt(mean_square_R + eps)[:, None] * weight_E[None, :]


# Grid: (cdiv(T * H, BLOCK_R),). One program normalises BLOCK_R rows, each held whole.
@triton.jit
def rms_norm_kernel(
    x_ptr,
    weight_ptr,
    y_ptr,
    num_rows,
    num_heads,
    stride_x_T,
    stride_x_H,
    eps,
    E: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    row_R = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    e_E = tl.arange(0, BLOCK_E)
    mask_RE = (row_R < num_rows)[:, None] & (e_E < E)[None, :]
    token_R = (row_R // num_heads).to(tl.int64)
    start_R = token_R * stride_x_T + (row_R % num_heads) * stride_x_H
    x_RE = tl.load(x_ptr + start_R[:, None] + e_E[None, :], mask=mask_RE, other=0.0)
    y_RE = _normalise(x_RE.to(tl.float32), weight_ptr, e_E, E, eps)
    y_offset_RE = row_R.to(tl.int64)[:, None] * E + e_E[None, :]
    tl.store(y_ptr + y_offset_RE, round_to(y_RE, y_ptr.dtype.element_ty), mask=mask_RE)


# Grid: (cdiv(T, BLOCK_R),).
@triton.jit
def add_rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    num_rows,
    stride_x_T,
    stride_residual_T,
    eps,
    E: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    row_R = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    e_E = tl.arange(0, BLOCK_E)
    mask_RE = (row_R < num_rows)[:, None] & (e_E < E)[None, :]
    row_R1 = row_R.to(tl.int64)[:, None]
    x_RE = tl.load(x_ptr + row_R1 * stride_x_T + e_E[None, :], mask=mask_RE, other=0.0)
    residual_RE_ptr = residual_ptr + row_R1 * stride_residual_T + e_E[None, :]
    residual_RE = tl.load(residual_RE_ptr, mask=mask_RE, other=0.0).to(tl.float32)
    # The next layer reads the rounded sum, so the norm is taken of the rounded sum.
    sum_RE = round_to(residual_RE + x_RE.to(tl.float32), residual_ptr.dtype.element_ty)
    tl.store(residual_RE_ptr, sum_RE, mask=mask_RE)
    y_RE = _normalise(sum_RE.to(tl.float32), weight_ptr, e_E, E, eps)
    y_ptrs = y_ptr + row_R1 * E + e_E[None, :]
    tl.store(y_ptrs, round_to(y_RE, y_ptr.dtype.element_ty), mask=mask_RE)


def rms_norm_launch(x: Tensor, weight_E: Tensor, y: Tensor, eps: float) -> Launch:
    """y = rms_norm(x), with x [T, E] or [T, H, E] and y contiguous of the same shape."""
    num_heads = x.shape[1] if x.ndim == 3 else 1
    num_rows = x.shape[0] * num_heads
    block_rows, block_width, num_warps = _tile(x.shape[-1])
    return Launch(
        kernel=rms_norm_kernel,
        grid=(triton.cdiv(num_rows, block_rows),),
        args={
            "x_ptr": x,
            "weight_ptr": weight_E,
            "y_ptr": y,
            "num_rows": num_rows,
            "num_heads": num_heads,
            "stride_x_T": x.stride(0),
            "stride_x_H": x.stride(1) if x.ndim == 3 else 0,
            "eps": eps,
        },
        constants={"E": x.shape[-1], "BLOCK_R": block_rows, "BLOCK_E": block_width},
        num_warps=num_warps,
    )


def add_rms_norm_launch(
    x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, y_TE: Tensor, eps: float
) -> Launch:
    """residual += x; y = rms_norm(residual), with y contiguous."""
    num_rows, width = x_TE.shape
    block_rows, block_width, num_warps = _tile(width)
    return Launch(
        kernel=add_rms_norm_kernel,
        grid=(triton.cdiv(num_rows, block_rows),),
        args={
            "x_ptr": x_TE,
            "residual_ptr": residual_TE,
            "weight_ptr": weight_E,
            "y_ptr": y_TE,
            "num_rows": num_rows,
            "stride_x_T": x_TE.stride(0),
            "stride_residual_T": residual_TE.stride(0),
            "eps": eps,
        },
        constants={"E": width, "BLOCK_R": block_rows, "BLOCK_E": block_width},
        num_warps=num_warps,
    )


def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """A new contiguous tensor of x's shape and dtype; `Ops.rms_norm` has the contract."""
    check_dtype("x", x_TE)
    check_dtype("weight_E", weight_E, FLOAT_DTYPES)
    check_last_dim_contiguous("x", x_TE)
    check_shape("weight_E", weight_E, (x_TE.shape[-1],))
    x = x_TE if x_TE.ndim in (2, 3) else x_TE.reshape(-1, x_TE.shape[-1])
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    run(rms_norm_launch(x, weight_E.contiguous(), y, eps))
    return y.view(x_TE.shape)


def add_rms_norm(x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """residual += x in place; a new tensor of residual's dtype, the norm of the rounded sum."""
    check_dtype("x_TE", x_TE)
    check_dtype("residual_TE", residual_TE)
    check_dtype("weight_E", weight_E)
    check_shape("residual_TE", residual_TE, (x_TE.shape[0], x_TE.shape[-1]))
    check_shape("weight_E", weight_E, (x_TE.shape[-1],))
    check_last_dim_contiguous("x_TE", x_TE)
    check_last_dim_contiguous("residual_TE", residual_TE)
    y_TE = torch.empty_like(residual_TE, memory_format=torch.contiguous_format)
    run(add_rms_norm_launch(x_TE, residual_TE, weight_E.contiguous(), y_TE, eps))
    return y_TE


def _tile(width: int) -> tuple[int, int, int]:
    """(rows per program, padded width, warps)."""
    block_width = triton.next_power_of_2(width)
    block_rows = max(1, _TILE_ELEMENTS // block_width)
    num_warps = 4 if block_width <= 4096 else 8 if block_width <= 8192 else 16
    return block_rows, block_width, num_warps
