"""Rows of x on their way into a product: as what comes before writes them, and as it reads them.

The two are the same memory, unless the product takes float32 as a sum of bfloat16 parts.
"""

import torch
from torch import Tensor

from pageray.kernels.cpu.jit import jit, jit_exact
from pageray.kernels.cpu.memory import BFLOAT16_CELL, Array, Cell, Pointer, flat, past, pointer
from pageray.kernels.cpu.numerics import INFINITY, ZERO, narrow, widen
from pageray.kernels.cpu.packed_weight import PackedWeight

Rows = tuple[int, Cell, int, int, int]
"""Address and cell of what is written, dense; address of what is multiplied, distance of its rows in
elements of 4 bytes, and parts that are still to be made (0: none)."""

_BFLOAT16 = torch.bfloat16
_STRIDE_BYTES = 4
"""What distances of rows are counted in."""


class Operand:
    """Room for [num_rows, E] of x, for products with `weight`."""

    def __init__(self, num_rows: int, weight: PackedWeight) -> None:
        self._written = torch.empty(num_rows, weight.num_inputs, dtype=weight.x_dtype)
        self._read = self._written
        num_parts = weight.num_parts if weight.num_parts > 1 else 0
        if num_parts:
            self._read = torch.empty(num_rows, num_parts, weight.num_inputs, dtype=_BFLOAT16)
        # The object keeps alive what these addresses are of.
        self.rows: Rows = (
            *pointer(self._written),
            self._read.data_ptr(),
            self._read.stride(0) * self._read.element_size() // _STRIDE_BYTES,
            num_parts,
        )


def operand_of(x_TE: Tensor, weight: PackedWeight) -> tuple[Tensor, int]:
    """x as products with `weight` read it, copied only if it must be, and the distance of its rows
    in elements of 4 bytes. Raises ValueError for another width."""
    num_inputs = weight.num_inputs
    if x_TE.dim() != 2 or x_TE.shape[1] != num_inputs:
        raise ValueError(f"x has shape {tuple(x_TE.shape)}; its last dim must be {num_inputs}")
    x_TE = x_TE.to(weight.x_dtype)
    if x_TE.stride(1) != 1 or x_TE.stride(0) * x_TE.element_size() % _STRIDE_BYTES:
        x_TE = x_TE.contiguous()
    num_parts = weight.num_parts
    if num_parts > 1:
        x_TE = x_TE.contiguous()
        parts = torch.empty(x_TE.shape[0], num_parts * num_inputs, dtype=_BFLOAT16)
        stride = parts.stride(0) // 2
        rows = (*pointer(x_TE), parts.data_ptr(), stride, num_parts)
        cut_rows(rows, num_inputs, 0, x_TE.shape[0])
        return parts, stride
    return x_TE, x_TE.stride(0) * x_TE.element_size() // _STRIDE_BYTES


@jit
def written(rows: Rows) -> Pointer:
    """Where the operation before the product writes."""
    return rows[0], rows[1]


@jit
def rows_from(rows: Rows, width: int, first: int) -> Rows:
    """What is left from row `first` on."""
    (address, cell), (_, _, read_at, stride, num_parts) = past(written(rows), first * width), rows
    return address, cell, read_at + _STRIDE_BYTES * first * stride, stride, num_parts


@jit
def cut_rows(rows: Rows, width: int, start: int, stop: int) -> None:
    """Make the parts of rows start .. stop - 1, if there are any to be made."""
    x_at, parts_at, num_parts = written(rows), (rows[2], BFLOAT16_CELL), rows[4]
    if num_parts > 0:
        for row in range(start, stop):
            _cut_row(
                flat(x_at, row * width),
                flat(parts_at, row * num_parts * width),
                flat(parts_at, (row * num_parts + 1) * width),
                flat(parts_at, (row * num_parts + 2) * width),
                width,
            )


@jit_exact
def _cut_row(x: Array, high: Array, middle: Array, low: Array, width: int) -> None:
    """high + middle + low = x, each as near as bfloat16 allows; an infinity is all in the first."""
    for e in range(width):
        value = widen(x[e])
        high[e] = narrow(value, high)
        rest = _rest(value, widen(high[e]))
        middle[e] = narrow(rest, middle)
        low[e] = narrow(_rest(rest, widen(middle[e])), low)


@jit_exact
def _rest(value: float, part: float) -> float:
    is_infinite = (part if part > ZERO else -part) == INFINITY
    return ZERO if is_infinite else value - part
