"""Heads of q or k, normalised and rotated in registers.

With c, s the cosine and sine of position p and pair i, R rotated dims, and x the head, normalised
(`rms_norm.py`) if the model does that (Su et al. 2021, arXiv:2104.09864):
    y[i] = x[i] c - x[i + R/2] s,    y[i + R/2] = x[i + R/2] c + x[i] s,    y[d] = x[d] from R on.

Shapes: h a tile of heads, I the R/2 pairs, J the D - R dims that are not rotated. A head's lower
pairs, upper pairs and rest are held apart, so that a thread that stores a rotated pair in place has
read both numbers of it itself.
"""

# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# Reason: values inside a @triton.jit function have no Python types.

import triton
import triton.language as tl

from pageray.kernels.gpu.quantise import quantise


@triton.jit
def load_float(x_ptr, mask):
    return tl.load(x_ptr, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def turn_heads(
    x_ptr,
    weight_ptr,
    eps,
    cos_sin_ptr,
    mask_h,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """(low_hI, high_hI, rest_hJ) of the heads that start at `x_ptr` [h, 1], normalised, rotated."""
    i_I = tl.arange(0, BLOCK_I)
    j_J = 2 * HALF + tl.arange(0, BLOCK_J)
    mask_hI = mask_h & (i_I < HALF)[None, :]
    low_hI = load_float(x_ptr + i_I[None, :], mask_hI)
    high_hI = load_float(x_ptr + HALF + i_I[None, :], mask_hI)
    rest_hJ = low_hI  # Not used unless there is a rest.
    if D > 2 * HALF:
        rest_hJ = load_float(x_ptr + j_J[None, :], mask_h & (j_J < D)[None, :])
    if HAS_NORM:
        squares_h = tl.sum(low_hI * low_hI, axis=1) + tl.sum(high_hI * high_hI, axis=1)
        if D > 2 * HALF:
            squares_h += tl.sum(rest_hJ * rest_hJ, axis=1)
        factor_h1 = tl.rsqrt(squares_h / D + eps)[:, None]
        low_hI = low_hI * factor_h1 * load_float(weight_ptr + i_I, i_I < HALF)[None, :]
        high_hI = high_hI * factor_h1 * load_float(weight_ptr + HALF + i_I, i_I < HALF)[None, :]
        if D > 2 * HALF:
            rest_hJ = rest_hJ * factor_h1 * load_float(weight_ptr + j_J, j_J < D)[None, :]
    cos_1I = load_float(cos_sin_ptr + i_I, i_I < HALF)[None, :]
    sin_1I = load_float(cos_sin_ptr + HALF + i_I, i_I < HALF)[None, :]
    return low_hI * cos_1I - high_hI * sin_1I, high_hI * cos_1I + low_hI * sin_1I, rest_hJ


@triton.jit
def store_heads(
    y_ptr,
    low_hI,
    high_hI,
    rest_hJ,
    scale,
    mask_h,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    """Store what `turn_heads` gave to the heads that start at `y_ptr` [h, 1]."""
    i_I = tl.arange(0, BLOCK_I)
    j_J = 2 * HALF + tl.arange(0, BLOCK_J)
    mask_hI = mask_h & (i_I < HALF)[None, :]
    y_dtype: tl.constexpr = y_ptr.dtype.element_ty
    tl.store(y_ptr + i_I[None, :], quantise(low_hI, scale, y_dtype), mask=mask_hI)
    tl.store(y_ptr + HALF + i_I[None, :], quantise(high_hI, scale, y_dtype), mask=mask_hI)
    if D > 2 * HALF:
        mask_hJ = mask_h & (j_J < D)[None, :]
        tl.store(y_ptr + j_J[None, :], quantise(rest_hJ, scale, y_dtype), mask=mask_hJ)
