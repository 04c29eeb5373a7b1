"""y = (x W) * scale + bias over the panels of a packed weight, and the same with a SwiGLU gate.

Rows of x are taken in blocks that stay in the second-level cache while every panel passes over
them; a panel stays in the first-level cache while it meets the rows of a block. Threads take
(block, run of panels) units off a counter, so that one held up by another process holds up nobody.

Shapes: x_ME float32, y_MO; panels as in `packed_weight.py`.
"""

import numpy as np
import torch
from torch import Tensor

from pageray.kernels.cpu.jit import jit, jit_threaded, num_threads, prange
from pageray.kernels.cpu.memory import FLOAT_CELL, Array, Cell, Pointer, flat, pointer
from pageray.kernels.cpu.numerics import ZERO, narrow, sigmoid
from pageray.kernels.cpu.packed_weight import PackedWeight
from pageray.kernels.cpu.tile_product import HALF_PANEL, MAX_ROWS, PANEL, tile_product
from pageray.kernels.cpu.work_counter import fetch_add_one

_BLOCK_BYTES = 1 << 18
"""Of x, in float32: half of a small second-level cache."""
_UNITS_PER_THREAD = 4
_MAX_UNIT_PANELS = 32

Panels = tuple[int, Cell, int, int, int, int, int]
"""Address and cell of the panels, bytes of an element, inputs E, outputs O, addresses of scale and
bias. Flat, because Numba takes no nested tuple into a parallel loop."""


def panels_of(weight: PackedWeight) -> Panels:
    """The weight as the compiled functions take it; the caller keeps it alive."""
    return (
        *pointer(weight.panels_PEN),
        weight.panels_PEN.element_size(),
        weight.num_inputs,
        weight.num_outputs,
        weight.scale_O.data_ptr(),
        weight.bias_O.data_ptr(),
    )


def float_rows(x_TE: Tensor, width: int) -> Tensor:
    """x as float32 [M, width] with dense rows, copied only if it must be. Raises ValueError for
    another width."""
    if x_TE.dim() != 2 or x_TE.shape[1] != width:
        raise ValueError(f"x has shape {tuple(x_TE.shape)}; its last dim must be {width}")
    x_TE = x_TE.float()
    return x_TE if x_TE.stride(1) == 1 else x_TE.contiguous()


def multiply(x_TE: Tensor, weight: PackedWeight, panels: Panels) -> Tensor:
    """A new contiguous [T, O] tensor of x's dtype; sums run in float32 and are rounded once.

    `panels` is `panels_of(weight)`, made once. Raises ValueError for an x of another width.
    """
    rows_TE = float_rows(x_TE, weight.num_inputs)
    y_TO = torch.empty((x_TE.shape[0], weight.num_outputs), dtype=x_TE.dtype)
    args = (rows_TE.data_ptr(), rows_TE.stride(0), rows_TE.shape[0], panels, pointer(y_TO))
    num_parts = num_threads(weight.panels_PEN.numel())
    if num_parts == 1:
        _multiply(*args)
    else:
        _multiply_threaded(*args, num_parts)
    return y_TO


@jit
def block_rows(num_inputs: int) -> int:
    """Rows of x in a block: a multiple of a tile's, at least one tile."""
    return max(1, _BLOCK_BYTES // (4 * num_inputs * MAX_ROWS)) * MAX_ROWS


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
    num_inputs, num_outputs = panels[3], panels[4]
    rows_of_block = block_rows(num_inputs)
    panels_of_unit = unit_panels(num_outputs, num_parts)
    num_panels = (num_outputs + PANEL - 1) // PANEL
    units_of_block = (num_panels + panels_of_unit - 1) // panels_of_unit
    num_units = (num_rows + rows_of_block - 1) // rows_of_block * units_of_block
    tile_MN = np.empty((MAX_ROWS, PANEL), np.float32)
    unit = fetch_add_one(counter)
    while unit < num_units:
        first_row = unit // units_of_block * rows_of_block
        end_row = min(num_rows, first_row + rows_of_block)
        first_panel = unit % units_of_block * panels_of_unit
        for panel in range(first_panel, min(num_panels, first_panel + panels_of_unit)):
            row = first_row
            while row < end_row:
                tile_rows = next_tile_rows(end_row - row)
                fill_tile(tile_MN, x_at + 4 * row * x_stride, x_stride, tile_rows, panels, panel)
                if is_gated:
                    _store_gated(tile_MN, tile_rows, panels, panel, y_at, row)
                else:
                    _store(tile_MN, tile_rows, panels, panel, y_at, row)
                row += tile_rows
        unit = fetch_add_one(counter)


@jit
def _store(
    tile_MN: Array, tile_rows: int, panels: Panels, panel: int, y_at: Pointer, row: int
) -> None:
    """y = tile * scale + bias, for rows from `row` on and the panel's columns."""
    num_outputs, first = panels[4], panel * PANEL
    scale, bias = _floats(panels[5], first), _floats(panels[6], first)
    for m in range(tile_rows):
        y = flat(y_at, (row + m) * num_outputs + first)
        for n in range(min(PANEL, num_outputs - first)):
            y[n] = narrow(tile_MN[m, n] * scale[n] + bias[n], y)


@jit
def _store_gated(
    tile_MN: Array, tile_rows: int, panels: Panels, panel: int, y_at: Pointer, row: int
) -> None:
    """y = silu(gate) * up, for a panel whose first half is gates and its second their ups."""
    num_outputs, first = panels[4], panel * PANEL
    scale, bias = _floats(panels[5], first), _floats(panels[6], first)
    up_scale = _floats(panels[5], first + HALF_PANEL)
    up_bias = _floats(panels[6], first + HALF_PANEL)
    for m in range(tile_rows):
        y = flat(y_at, ((row + m) * num_outputs + first) // 2)
        for n in range(HALF_PANEL):
            gate = tile_MN[m, n] * scale[n] + bias[n]
            up = tile_MN[m, HALF_PANEL + n] * up_scale[n] + up_bias[n]
            y[n] = narrow(gate * sigmoid(gate) * up, y)


@jit
def _floats(address: int, offset: int) -> Array:
    return flat((address, FLOAT_CELL), offset)


@jit
def next_tile_rows(rows_left: int) -> int:
    """How many rows the next tile takes: as equal parts as there are, none above MAX_ROWS."""
    num_tiles = (rows_left + MAX_ROWS - 1) // MAX_ROWS
    return (rows_left + num_tiles - 1) // num_tiles


@jit
def fill_tile(
    tile_MN: Array, x_at: int, x_stride: int, num_rows: int, panels: Panels, panel: int
) -> None:
    """tile = x w for the rows from `x_at` on and one panel."""
    w_address, cell, element_bytes, num_inputs, _, _, _ = panels
    for m in range(num_rows):
        for n in range(PANEL):
            tile_MN[m, n] = ZERO
    w_at = (w_address + panel * num_inputs * PANEL * element_bytes, cell)
    tile_at = tile_MN.ctypes.data
    tile_product(num_rows, x_at, x_stride, w_at, PANEL, num_inputs, tile_at, PANEL)
