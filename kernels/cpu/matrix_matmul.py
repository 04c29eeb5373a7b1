"""A thread's units of a product on matrix registers.

A tile is stored while the next one is computed. A panel too deep for the first-level cache is taken
in slices; each meets all rows of a block before the next, and adds to the sums in memory, in the
order in which they would have run.
"""

import numpy as np

from pageray.kernels.cpu.jit import jit
from pageray.kernels.cpu.matrix_tile import (
    MATRIX_DEPTH,
    MAX_MATRIX_ROWS,
    REGISTER_ROWS,
    give_back_matrix_registers,
    is_widened_first,
    take_matrix_registers,
)
from pageray.kernels.cpu.memory import ALIGNMENT, Array, Pointer, aligned, flat
from pageray.kernels.cpu.numerics import to_int64
from pageray.kernels.cpu.panels import (
    Panels,
    cut_units,
    is_whole,
    places_of_tile,
    store_tile,
    unit_at,
)
from pageray.kernels.cpu.product_beside_store import (
    multiply_and_store,
    multiply_and_store_gated,
    multiply_new_and_store,
    multiply_new_and_store_gated,
)
from pageray.kernels.cpu.tile_product import PANEL
from pageray.kernels.cpu.widen_panel import widen_panel
from pageray.kernels.cpu.work_counter import fetch_add_one

_TILE_BYTES = 4 * MAX_MATRIX_ROWS * PANEL
_STEP = MATRIX_DEPTH // 2
_MAX_RESIDENT_DEPTH = 320
"""Pairs that a panel may have to stay in a first-level cache of 48 KiB."""

_NARROW_BYTES = 2

_Tile = tuple[int, int, int, int]
"""Address of its first row to be stored, number of these, panel, row of y."""


@jit
def multiply_units_in_matrix(
    x_at: int,
    x_stride: int,
    num_rows: int,
    panels: Panels,
    y_at: Pointer,
    is_gated: bool,
    num_parts: int,
    counter: Array,
) -> None:
    """`multiply_units` for weights that matrix registers take."""
    w, cell, row_bytes, depth, num_outputs, _, _, _ = panels
    is_widened = is_widened_first(cell)
    # Stores of whole lines keep loads waiting that come soon after: these are better all at once.
    is_narrow = flat(y_at, 0).itemsize <= _NARROW_BYTES
    take_matrix_registers(num_rows)
    units = cut_units(num_rows, x_stride, num_outputs, num_parts, MAX_MATRIX_ROWS)
    # One more than a block has: a tile of the panel before may still wait to be stored.
    num_tiles = _count_tiles(min(num_rows, units[2])) + 1
    tiles = np.empty(num_tiles * _TILE_BYTES + ALIGNMENT, np.uint8)
    widened = np.empty(depth * PANEL if is_widened else 0, np.int32)
    tiles_at, widened_at = aligned(to_int64(tiles.ctypes.data)), to_int64(widened.ctypes.data)
    waiting: _Tile = (tiles_at, 0, 0, 0)
    unit = fetch_add_one(counter)
    while unit < units[0]:
        first_row, end_row, first_panel, end_panel = unit_at(unit, units, num_rows, num_outputs)
        slice_depth = _slice_depth(depth, _count_tiles(end_row - first_row))
        for panel in range(first_panel, end_panel):
            w_at = w + panel * depth * row_bytes
            if is_widened:
                widen_panel(w_at, widened_at, 2 * depth * PANEL)
                w_at = widened_at
            # Not where the one tile of a panel before waits.
            first_at = tiles_at if waiting[0] >= tiles_at + _TILE_BYTES else tiles_at + _TILE_BYTES
            for k in range(0, depth, slice_depth):
                end_k = min(depth, k + slice_depth)
                tile_at, row = first_at, first_row
                while row < end_row:
                    end = min(end_row, row + MAX_MATRIX_ROWS)
                    start = row
                    if end - row < REGISTER_ROWS:
                        # A register is filled with rows before, if there are any.
                        start = max(0, end - REGISTER_ROWS)
                    _multiply_tile(
                        end - start,
                        x_at + 4 * (start * x_stride + k),
                        (x_stride, depth),
                        (w_at + 4 * k * PANEL, end_k - k, row == first_row and not is_widened),
                        (tile_at, k > 0),
                        panels,
                        waiting,
                        y_at,
                        is_gated,
                    )
                    sums_at = tile_at + 4 * (row - start) * PANEL
                    waiting = (sums_at, 0, panel, row)
                    if end_k == depth:
                        if is_gated or (is_narrow and is_whole(panels, panel)):
                            waiting = (sums_at, end - row, panel, row)
                        else:
                            store_tile(sums_at, end - row, panels, panel, y_at, row, is_gated)
                    tile_at += _TILE_BYTES
                    row = end
        unit = fetch_add_one(counter)
    give_back_matrix_registers()
    if waiting[1] > 0:
        store_tile(waiting[0], waiting[1], panels, waiting[2], y_at, waiting[3], is_gated)
    # Used by name once more, so that what is reached by address alone is still there until here.
    tiles[:1] = 0
    widened[:1] = 0


@jit
def _count_tiles(num_rows: int) -> int:
    return (num_rows + MAX_MATRIX_ROWS - 1) // MAX_MATRIX_ROWS


@jit
def _slice_depth(depth: int, num_tiles: int) -> int:
    """All of it, or equal parts that stay in the cache while several tiles meet them."""
    if num_tiles == 1:
        return depth
    num_slices = (depth + _MAX_RESIDENT_DEPTH - 1) // _MAX_RESIDENT_DEPTH
    return (depth + num_slices * _STEP - 1) // (num_slices * _STEP) * _STEP


@jit
def _multiply_tile(
    num_rows: int,
    x_at: int,
    x_strides: tuple[int, int],
    weights: tuple[int, int, bool],
    tile: tuple[int, bool],
    panels: Panels,
    waiting: _Tile,
    y_at: Pointer,
    is_gated: bool,
) -> None:
    """Fill a tile, or add to it, and store what waits.

    `weights`: address, depth, and whether they are new to the cache. `tile`: address, and whether
    the product adds to it.
    """
    w_at, depth, is_new = weights
    tile_at, adds = tile
    parts = panels[7]
    stored_at, stored_rows, panel, row = waiting
    scale_at, bias_at, offset, stride = places_of_tile(panels, panel, row, is_gated)
    if is_gated:
        if is_new:
            multiply_new_and_store_gated(
                num_rows,
                x_at,
                x_strides,
                parts,
                w_at,
                depth,
                tile_at,
                adds,
                stored_rows,
                stored_at,
                scale_at,
                bias_at,
                y_at,
                offset,
                stride,
            )
        else:
            multiply_and_store_gated(
                num_rows,
                x_at,
                x_strides,
                parts,
                w_at,
                depth,
                tile_at,
                adds,
                stored_rows,
                stored_at,
                scale_at,
                bias_at,
                y_at,
                offset,
                stride,
            )
    elif is_new:
        multiply_new_and_store(
            num_rows,
            x_at,
            x_strides,
            parts,
            w_at,
            depth,
            tile_at,
            adds,
            stored_rows,
            stored_at,
            scale_at,
            bias_at,
            y_at,
            offset,
            stride,
        )
    else:
        multiply_and_store(
            num_rows,
            x_at,
            x_strides,
            parts,
            w_at,
            depth,
            tile_at,
            adds,
            stored_rows,
            stored_at,
            scale_at,
            bias_at,
            y_at,
            offset,
            stride,
        )
