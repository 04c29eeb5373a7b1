"""y = (x W) * scale + bias over the panels of a packed weight, and the same with a SwiGLU gate.

Shapes: x_ME as `operand.py` prepares it, y_MO; panels as in `packed_weight.py`. The cut into units
is in `panels.py`; on matrix registers units are computed by `matrix_matmul.py`.
"""

import numpy as np
import torch
from torch import Tensor

from pageray.kernels.cpu.jit import jit, jit_threaded, num_threads, prange
from pageray.kernels.cpu.matrix_matmul import multiply_units_in_matrix
from pageray.kernels.cpu.matrix_tile import is_for_matrix_registers, is_widened_first
from pageray.kernels.cpu.memory import Array, Pointer, pointer
from pageray.kernels.cpu.numerics import ZERO
from pageray.kernels.cpu.operand import operand_of
from pageray.kernels.cpu.packed_weight import PackedWeight
from pageray.kernels.cpu.panels import Panels, cut_units, floats, store_tile, unit_at
from pageray.kernels.cpu.tile_product import MAX_ROWS, PANEL, tile_product
from pageray.kernels.cpu.work_counter import fetch_add_one, new_counters


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
        multiply_in_threads(*args, False, num_parts)
    return y_TO


@jit
def _multiply(x_at: int, x_stride: int, num_rows: int, panels: Panels, y_at: Pointer) -> None:
    multiply_units(x_at, x_stride, num_rows, panels, y_at, False, 1, new_counters(1)[0])


@jit_threaded
def multiply_in_threads(
    x_at: int,
    x_stride: int,
    num_rows: int,
    panels: Panels,
    y_at: Pointer,
    is_gated: bool,
    num_parts: int,
) -> None:
    """Every unit, on so many threads. A function of its own because Numba compiles every parallel
    loop from the ground up, and this one is in every block of a layer."""
    counter = new_counters(1)[0]
    for _ in prange(num_parts):
        multiply_units(x_at, x_stride, num_rows, panels, y_at, is_gated, num_parts, counter)


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
    if is_for_matrix_registers(panels[1]) or (is_widened_first(panels[1]) and panels[7] > 0):
        multiply_units_in_matrix(
            x_at, x_stride, num_rows, panels, y_at, is_gated, num_parts, counter
        )
    else:
        _multiply_units_in_vectors(
            x_at, x_stride, num_rows, panels, y_at, is_gated, num_parts, counter
        )


@jit
def _multiply_units_in_vectors(
    x_at: int,
    x_stride: int,
    num_rows: int,
    panels: Panels,
    y_at: Pointer,
    is_gated: bool,
    num_parts: int,
    counter: Array,
) -> None:
    w, cell, row_bytes, depth, num_outputs, _, _, _ = panels
    units = cut_units(num_rows, x_stride, num_outputs, num_parts, MAX_ROWS)
    tile_MN = np.empty((MAX_ROWS, PANEL), np.float32)
    tile_at = tile_MN.ctypes.data
    unit = fetch_add_one(counter)
    while unit < units[0]:
        row, end_row, first_panel, end_panel = unit_at(unit, units, num_rows, num_outputs)
        first_row = row
        for panel in range(first_panel, end_panel):
            w_at = (w + panel * depth * row_bytes, cell)
            row = first_row
            while row < end_row:
                end = row + next_tile_rows(end_row - row)
                _fill(tile_at, x_at + 4 * row * x_stride, x_stride, end - row, w_at, depth)
                store_tile(tile_at, end - row, panels, panel, y_at, row, is_gated)
                row = end
        unit = fetch_add_one(counter)
    # Used by name once more, so that what is reached by address alone is still there until here.
    tile_MN[:1] = ZERO


@jit
def next_tile_rows(rows_left: int) -> int:
    """How many rows the next tile takes: as equal parts as there are, none above MAX_ROWS."""
    num_tiles = (rows_left + MAX_ROWS - 1) // MAX_ROWS
    return (rows_left + num_tiles - 1) // num_tiles


@jit
def _fill(tile_at: int, x_at: int, x_stride: int, num_rows: int, w_at: Pointer, depth: int) -> None:
    """tile = x w for the rows from `x_at` on and the panel at `w_at`."""
    tile = floats(tile_at)
    for e in range(num_rows * PANEL):
        tile[e] = ZERO
    tile_product(num_rows, x_at, x_stride, w_at, PANEL, depth, tile_at, PANEL)
