"""Rotary position embedding in half-split (NeoX) pairs (Su et al. 2021, arXiv:2104.09864).

With c, s the cosine and sine of position p and pair i, and R rotated dims:
    y[i] = x[i] c - x[i + R/2] s,    y[i + R/2] = x[i + R/2] c + x[i] s.
"""

import torch
from torch import Tensor

from pageray.kernels.cpu.jit import jit, jit_threaded, num_threads, part, prange
from pageray.kernels.cpu.memory import (
    Pointer,
    flat,
    pointer,
    require_dtype,
    require_float,
    require_in_range,
    require_shape,
)
from pageray.kernels.cpu.numerics import narrow, widen

_Heads = tuple[int, int, int]
"""Number of heads, token stride, head stride."""


def apply_rope(q_THD: Tensor, k_TKD: Tensor, positions_T: Tensor, cos_sin_LD: Tensor) -> None:
    """Rotate the first R = cos_sin_LD.shape[1] dims of q and k in place; the rest stays.

    Raises ValueError on a position outside the table, an odd R or one above the head dim.
    """
    for name, x_THD in (("q", q_THD), ("k", k_TKD)):
        require_float(name, x_THD)
        require_shape(name, x_THD, positions_T.shape[0], x_THD.shape[1], q_THD.shape[2])
    require_dtype("positions", positions_T, torch.int64)
    require_dtype("cos_sin", cos_sin_LD, torch.float32)
    length, rotary_dim = cos_sin_LD.shape
    if rotary_dim % 2 or rotary_dim > q_THD.shape[2]:
        raise ValueError(
            f"cos_sin has {rotary_dim} columns; it must be even and at most the head dim "
            f"({q_THD.shape[2]})"
        )
    require_in_range("positions", positions_T, 0, length)
    args = (
        pointer(q_THD),
        (q_THD.shape[1], q_THD.stride(0), q_THD.stride(1)),
        pointer(k_TKD),
        (k_TKD.shape[1], k_TKD.stride(0), k_TKD.stride(1)),
        pointer(positions_T),
        pointer(cos_sin_LD),
        (cos_sin_LD.stride(0), rotary_dim // 2),
    )
    num_parts = num_threads(q_THD.numel() + k_TKD.numel())
    if num_parts == 1:
        _rotate_tokens(*args, 0, positions_T.shape[0])
    else:
        _rotate_tokens_threaded(*args, positions_T.shape[0], num_parts)


@jit
def _rotate_tokens(
    q_at: Pointer,
    q_heads: _Heads,
    k_at: Pointer,
    k_heads: _Heads,
    positions_at: Pointer,
    table_at: Pointer,
    table_shape: tuple[int, int],
    start: int,
    stop: int,
) -> None:
    positions = flat(positions_at, 0)
    row_stride, half = table_shape
    for token in range(start, stop):
        angles = positions[token] * row_stride
        _rotate_heads(q_at, q_heads, token, table_at, angles, half)
        _rotate_heads(k_at, k_heads, token, table_at, angles, half)


@jit
def _rotate_heads(
    x_at: Pointer, heads: _Heads, token: int, table_at: Pointer, angles: int, half: int
) -> None:
    """Rotate all heads of one token; its cosines start at element `angles` of the table."""
    cosines, sines = flat(table_at, angles), flat(table_at, angles + half)
    num_heads, token_stride, head_stride = heads
    for head in range(num_heads):
        start = token * token_stride + head * head_stride
        low, high = flat(x_at, start), flat(x_at, start + half)
        for i in range(half):
            x_low, x_high = widen(low[i]), widen(high[i])
            low[i] = narrow(x_low * cosines[i] - x_high * sines[i], low)
            high[i] = narrow(x_high * cosines[i] + x_low * sines[i], high)


@jit_threaded
def _rotate_tokens_threaded(
    q_at: Pointer,
    q_heads: _Heads,
    k_at: Pointer,
    k_heads: _Heads,
    positions_at: Pointer,
    table_at: Pointer,
    table_shape: tuple[int, int],
    num_tokens: int,
    num_parts: int,
) -> None:
    for index in prange(num_parts):
        start, stop = part(num_tokens, num_parts, index)
        _rotate_tokens(
            q_at, q_heads, k_at, k_heads, positions_at, table_at, table_shape, start, stop
        )
