"""y = (x W) * scale + bias over the panels of a packed weight, and the same with a SwiGLU gate.

Rows of x are taken in blocks that stay in the second-level cache while every panel passes over
them; a panel stays in the first-level cache while it meets the rows of a block. Threads take
(block, run of panels) units off a counter, so that one held up by another process holds up nobody.

Shapes: x_ME as `operand.py` prepares it, y_MO; panels as in `packed_weight.py`.
"""

import numpy as np
import torch
from torch import Tensor

from pageray.kernels.cpu.jit import jit, jit_threaded, num_threads, prange
from pageray.kernels.cpu.matrix_tile import (
    HAS_MATRIX_REGISTERS,
    MAX_MATRIX_ROWS,
    MAX_RESIDENT_DEPTH,
    REGISTER_ROWS,
    give_back_matrix_registers,
    is_for_matrix_registers,
    is_widened_first,
    matrix_product,
    matrix_product_of_new_weights,
    matrix_product_of_passing_rows,
    take_matrix_registers,
)
from pageray.kernels.cpu.memory import FLOAT_CELL, PAIR_CELL, Array, Cell, Pointer, flat, pointer
from pageray.kernels.cpu.numerics import ZERO, narrow, to_int64
from pageray.kernels.cpu.operand import operand_of
from pageray.kernels.cpu.packed_weight import PackedWeight
from pageray.kernels.cpu.store_tile import store_gated_rows, store_rows
from pageray.kernels.cpu.tile_product import MAX_ROWS, PANEL, tile_product
from pageray.kernels.cpu.widen_panel import widen_panel
from pageray.kernels.cpu.work_counter import fetch_add_one

_BLOCK_BYTES = 1 << (19 if HAS_MATRIX_REGISTERS else 18)
"""Of x: half of the second-level cache, or a quarter of the 2 MiB that go with matrix registers."""
_UNITS_PER_THREAD = 4
_MAX_UNIT_PANELS = 32

Panels = tuple[int, Cell, int, int, int, int, int, int]
"""Address and cell of the panels, bytes of a panel's row, rows of a panel, outputs O, addresses of
scale and bias, parts of x. Flat, because Numba takes no nested tuple into a parallel
loop."""


def panels_of(weight: PackedWeight) -> Panels:
    """The weight as the compiled functions take it; the caller keeps it alive."""
    return (
        *pointer(weight.panels_PKN),
        weight.bytes_per_row,
        weight.depth,
        weight.num_outputs,
        weight.scale_O.data_ptr(),
        weight.bias_O.data_ptr(),
        weight.num_parts,
    )


def addresses_of(panels: Panels) -> tuple[int, int, int]:
    """Of the panels, their scale and their bias: all that differs between weights of one shape."""
    return panels[0], panels[5], panels[6]


def kind_of(panels: Panels) -> tuple[object, ...]:
    """All the rest, to be compared."""
    return (panels[1].dtype, *panels[2:5], panels[7])


@jit
def at_addresses(panels: Panels, addresses: Array, first: int) -> Panels:
    """Panels of the same kind elsewhere: `addresses_of` them from element `first` on."""
    _, cell, row_bytes, depth, num_outputs, _, _, num_parts = panels
    w, scale, bias = addresses[first], addresses[first + 1], addresses[first + 2]
    return w, cell, row_bytes, depth, num_outputs, scale, bias, num_parts


def multiply(x_TE: Tensor, weight: PackedWeight, panels: Panels) -> Tensor:
    """A new contiguous [T, O] tensor of x's dtype; sums run in float32 and are rounded once.

    `panels` is `panels_of(weight)`, made once. Raises ValueError for an x of another width.
    """
    operand, stride = operand_of(x_TE, weight)
    y_TO = torch.empty((x_TE.shape[0], weight.num_outputs), dtype=x_TE.dtype)
    args = (operand.data_ptr(), stride, x_TE.shape[0], panels, pointer(y_TO))
    num_parts = num_threads(weight.panels_PKN.numel())
    if num_parts == 1:
        _multiply(*args)
    else:
        _multiply_threaded(*args, num_parts)
    return y_TO


@jit
def block_rows(x_stride: int, tile_rows: int) -> int:
    """Rows of x in a block: a multiple of a tile's, at least one tile."""
    return max(1, _BLOCK_BYTES // (4 * x_stride * tile_rows)) * tile_rows


@jit
def unit_panels(num_outputs: int, num_parts: int) -> int:
    """Panels that a thread takes at a time."""
    num_panels = (num_outputs + PANEL - 1) // PANEL
    return min(max(1, num_panels // (num_parts * _UNITS_PER_THREAD)), _MAX_UNIT_PANELS)


@jit
def _multiply(x_at: int, x_stride: int, num_rows: int, panels: Panels, y_at: Pointer) -> None:
    counter = np.zeros(1, np.int64)
    multiply_units(x_at, x_stride, num_rows, panels, y_at, False, 1, counter)


@jit_threaded
def _multiply_threaded(
    x_at: int, x_stride: int, num_rows: int, panels: Panels, y_at: Pointer, num_parts: int
) -> None:
    counter = np.zeros(1, np.int64)
    for _ in prange(num_parts):
        multiply_units(x_at, x_stride, num_rows, panels, y_at, False, num_parts, counter)


@jit
def multiply_units(
    x_at: int,
    x_stride: int,
    num_rows: int,
    panels: Panels,
    y_at: Pointer,
    is_gated: bool,
    num_parts: int,
    counter: Array,
) -> None:
    """One thread's share: take units off the counter until there are none. y is dense."""
    w, cell, row_bytes, depth, num_outputs, _, _, num_x_parts = panels
    is_widened = is_widened_first(cell) and num_x_parts > 0
    in_matrix = is_for_matrix_registers(cell) or is_widened
    max_rows = MAX_MATRIX_ROWS if in_matrix else MAX_ROWS
    if in_matrix:
        take_matrix_registers(num_rows)
    rows_of_block = block_rows(x_stride, max_rows)
    panels_of_unit = unit_panels(num_outputs, num_parts)
    num_panels = (num_outputs + PANEL - 1) // PANEL
    units_of_block = (num_panels + panels_of_unit - 1) // panels_of_unit
    num_units = (num_rows + rows_of_block - 1) // rows_of_block * units_of_block
    tile_MN = np.empty((max_rows, PANEL), np.float32)
    widened = np.empty(depth * PANEL if is_widened else 0, np.int32)
    tile_at, widened_at = tile_MN.ctypes.data, to_int64(widened.ctypes.data)
    unit = fetch_add_one(counter)
    while unit < num_units:
        first_row = unit // units_of_block * rows_of_block
        end_row = min(num_rows, first_row + rows_of_block)
        first_panel = unit % units_of_block * panels_of_unit
        for panel in range(first_panel, min(num_panels, first_panel + panels_of_unit)):
            panel_at = w + panel * depth * row_bytes
            if is_widened:
                widen_panel(panel_at, widened_at, 2 * depth * PANEL)
                panel_at = widened_at
            row = first_row
            while row < end_row:
                start = row
                if in_matrix:
                    end = min(end_row, row + MAX_MATRIX_ROWS)
                    if end - row < REGISTER_ROWS:
                        # A register is filled with rows before, if there are any.
                        start = max(0, end - REGISTER_ROWS)
                    is_new = row == first_row and not is_widened
                    at = x_at + 4 * start * x_stride
                    _fill_in_matrix(tile_at, at, x_stride, end - start, panels, panel_at, is_new)
                else:
                    end = row + next_tile_rows(end_row - row)
                    at, w_at = x_at + 4 * row * x_stride, (panel_at, cell)
                    _fill(tile_at, at, x_stride, end - row, w_at, depth)
                sums_at = tile_at + 4 * (row - start) * PANEL
                _store(sums_at, end - row, panels, panel, y_at, row, is_gated)
                row = end
        unit = fetch_add_one(counter)
    if in_matrix:
        give_back_matrix_registers()
    # Used by name once more, so that what is reached by address alone is still there until here.
    tile_MN[:1] = ZERO
    widened[:1] = 0


@jit
def _store(
    tile_at: int,
    num_rows: int,
    panels: Panels,
    panel: int,
    y_at: Pointer,
    row: int,
    is_gated: bool,
) -> None:
    """Rows of a tile become rows of y, from `row` on."""
    num_outputs, first = panels[4], panel * PANEL
    scale_at, bias_at = panels[5] + 4 * first, panels[6] + 4 * first
    if is_gated:
        offset, stride = (row * num_outputs + first) // 2, num_outputs // 2
        store_gated_rows(num_rows, tile_at, scale_at, bias_at, y_at, offset, stride)
    elif first + PANEL <= num_outputs:
        offset = row * num_outputs + first
        store_rows(num_rows, tile_at, scale_at, bias_at, y_at, offset, num_outputs)
    else:
        scale, bias = _floats(scale_at), _floats(bias_at)
        for m in range(num_rows):
            sum_N = _floats(tile_at + 4 * m * PANEL)
            y = flat(y_at, (row + m) * num_outputs + first)
            for n in range(num_outputs - first):
                y[n] = narrow(sum_N[n] * scale[n] + bias[n], y)


@jit
def _floats(address: int) -> Array:
    return flat((address, FLOAT_CELL), 0)


@jit
def next_tile_rows(rows_left: int) -> int:
    """How many rows the next tile takes: as equal parts as there are, none above MAX_ROWS."""
    num_tiles = (rows_left + MAX_ROWS - 1) // MAX_ROWS
    return (rows_left + num_tiles - 1) // num_tiles


@jit
def _fill(tile_at: int, x_at: int, x_stride: int, num_rows: int, w_at: Pointer, depth: int) -> None:
    """tile = x w for the rows from `x_at` on and the panel at `w_at`."""
    tile = _floats(tile_at)
    for e in range(num_rows * PANEL):
        tile[e] = ZERO
    tile_product(num_rows, x_at, x_stride, w_at, PANEL, depth, tile_at, PANEL)


@jit
def _fill_in_matrix(
    tile_at: int,
    x_at: int,
    x_stride: int,
    num_rows: int,
    panels: Panels,
    panel_at: int,
    is_new: bool,
) -> None:
    """The same on matrix registers, for a panel of pairs that may be new to the cache."""
    depth, parts, w_at = panels[3], panels[7], (panel_at, PAIR_CELL)
    if is_new:
        matrix_product_of_new_weights(
            num_rows, PANEL, x_at, x_stride, parts, w_at, depth, tile_at, PANEL, False
        )
    elif depth <= MAX_RESIDENT_DEPTH:
        matrix_product_of_passing_rows(
            num_rows, PANEL, x_at, x_stride, parts, w_at, depth, tile_at, PANEL, False
        )
    else:
        matrix_product(num_rows, PANEL, x_at, x_stride, parts, w_at, depth, tile_at, PANEL, False)
