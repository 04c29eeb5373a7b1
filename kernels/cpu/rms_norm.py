"""y = x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv:1910.07467)."""

import torch
from torch import Tensor

from pageray.kernels.cpu.jit import jit, jit_exact, jit_threaded, num_threads, part, prange
from pageray.kernels.cpu.memory import Pointer, flat, pointer, require_float, require_shape
from pageray.kernels.cpu.numerics import ONE, ZERO, float32, narrow, square_root, widen

_Strides = tuple[int, int, int]


def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """A new contiguous tensor of x's shape and dtype; computed in float32, rounded once."""
    require_float("x", x_TE)
    require_float("weight", weight_E)
    require_shape("weight", weight_E, x_TE.shape[-1])
    y_TE = torch.empty(x_TE.shape, dtype=x_TE.dtype)
    num_rows = x_TE.numel() // max(x_TE.shape[-1], 1)
    x_TE, strides = _row_strides(x_TE)
    args = (pointer(x_TE), strides, pointer(weight_E), pointer(y_TE), x_TE.shape[-1], eps)
    num_parts = num_threads(x_TE.numel())
    if num_parts == 1:
        _norm_rows(*args, 0, num_rows)
    else:
        _norm_rows_threaded(*args, num_rows, num_parts)
    return y_TE


def add_rms_norm(x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """residual += x in place, rounded to residual's dtype; returns rms_norm(residual).

    x and residual are contiguous; raises ValueError if not, or if their shapes differ.
    """
    require_float("x", x_TE)
    require_float("residual", residual_TE)
    require_shape("residual", residual_TE, *x_TE.shape)
    if not (x_TE.is_contiguous() and residual_TE.is_contiguous()):
        raise ValueError(
            f"add_rms_norm needs contiguous tensors; x has strides {x_TE.stride()}, "
            f"residual {residual_TE.stride()}"
        )
    args = (pointer(x_TE), pointer(residual_TE))
    num_parts = num_threads(x_TE.numel())
    if num_parts == 1:
        _add(*args, 0, x_TE.numel())
    else:
        _add_threaded(*args, x_TE.numel(), num_parts)
    return rms_norm(residual_TE, weight_E, eps)


def _row_strides(x: Tensor) -> tuple[Tensor, _Strides]:
    """x, copied if need be, and (inner, outer stride, inner stride): row r starts at element
    r // inner * outer stride + r % inner * inner stride."""
    if x.is_contiguous():
        return x, (1, x.shape[-1], 0)
    match x.dim():
        case 2:
            return x, (1, x.stride(0), 0)
        case 3:
            return x, (x.shape[1], x.stride(0), x.stride(1))
        case _:
            return x.contiguous(), (1, x.shape[-1], 0)


@jit
def norm_factor(x_at: Pointer, start: int, width: int, eps: float) -> float:
    """1 / sqrt(mean(x^2) + eps) of the `width` elements from `start` on, in float32."""
    x = flat(x_at, start)
    squares = ZERO
    for e in range(width):
        value = widen(x[e])
        squares += value * value
    return ONE / square_root(squares / float32(width) + float32(eps))


@jit_exact
def normalised(x: float, factor: float, weight: float) -> float:
    """x * factor * weight, in this order everywhere: the bits do not depend on the loop."""
    return x * factor * weight


@jit
def _norm_rows(
    x_at: Pointer,
    x_strides: _Strides,
    weight_at: Pointer,
    y_at: Pointer,
    width: int,
    eps: float,
    start: int,
    stop: int,
) -> None:
    weight = flat(weight_at, 0)
    inner, outer_stride, inner_stride = x_strides
    for row in range(start, stop):
        place = row // inner * outer_stride + row % inner * inner_stride
        x, y = flat(x_at, place), flat(y_at, row * width)
        factor = norm_factor(x_at, place, width, eps)
        for e in range(width):
            y[e] = narrow(normalised(widen(x[e]), factor, widen(weight[e])), y)


@jit_threaded
def _norm_rows_threaded(
    x_at: Pointer,
    x_strides: _Strides,
    weight_at: Pointer,
    y_at: Pointer,
    width: int,
    eps: float,
    num_rows: int,
    num_parts: int,
) -> None:
    for index in prange(num_parts):
        start, stop = part(num_rows, num_parts, index)
        _norm_rows(x_at, x_strides, weight_at, y_at, width, eps, start, stop)


@jit
def _add(x_at: Pointer, residual_at: Pointer, start: int, stop: int) -> None:
    x, residual = flat(x_at, start), flat(residual_at, start)
    for e in range(stop - start):
        residual[e] = narrow(widen(residual[e]) + widen(x[e]), residual)


@jit_threaded
def _add_threaded(x_at: Pointer, residual_at: Pointer, count: int, num_parts: int) -> None:
    for index in prange(num_parts):
        start, stop = part(count, num_parts, index)
        _add(x_at, residual_at, start, stop)


@jit
def add_and_norm_rows(
    x_address: int,
    residual_at: Pointer,
    weight_at: Pointer,
    y_at: Pointer,
    width: int,
    eps: float,
    start: int,
    stop: int,
) -> None:
    """residual += x, of the same dtype and dense; y = rms_norm(residual). No x at address 0."""
    for row in range(start, stop):
        if x_address != 0:
            x, residual = (
                flat((x_address, residual_at[1]), row * width),
                flat(residual_at, row * width),
            )
            for e in range(width):
                residual[e] = narrow(widen(residual[e]) + widen(x[e]), residual)
        _norm_rows(residual_at, (1, width, 0), weight_at, y_at, width, eps, row, row + 1)
