"""A packed weight as compiled functions take it, how a product is cut into units of work, and what
happens to the sums of a tile.

Rows of x are taken in blocks that stay in the second-level cache while every panel passes over
them; a panel stays in the first-level cache while it meets the rows of a block. Threads take
(block, run of panels) units off a counter, so that one held up by another process holds up nobody.
"""

from pageray.kernels.cpu.jit import jit
from pageray.kernels.cpu.matrix_tile import HAS_MATRIX_REGISTERS
from pageray.kernels.cpu.memory import FLOAT_CELL, Array, Cell, Pointer, flat, pointer
from pageray.kernels.cpu.numerics import narrow
from pageray.kernels.cpu.packed_weight import PackedWeight
from pageray.kernels.cpu.store_tile import store_gated_rows, store_rows
from pageray.kernels.cpu.tile_product import PANEL

_BLOCK_BYTES = 1 << (20 if HAS_MATRIX_REGISTERS else 18)
"""Of x: half of the second-level cache, which is of 2 MiB where there are matrix registers."""
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


Units = tuple[int, int, int, int]
"""How many there are, how many there are in a block, rows of a block, panels of a unit."""


@jit
def cut_units(
    num_rows: int, x_stride: int, num_outputs: int, num_parts: int, tile_rows: int
) -> Units:
    """Blocks are of whole tiles, at least one, as far as there are rows."""
    rows_of_block = max(1, _BLOCK_BYTES // (4 * x_stride * tile_rows)) * tile_rows
    num_panels = (num_outputs + PANEL - 1) // PANEL
    panels_of_unit = min(max(1, num_panels // (num_parts * _UNITS_PER_THREAD)), _MAX_UNIT_PANELS)
    units_of_block = (num_panels + panels_of_unit - 1) // panels_of_unit
    num_blocks = (num_rows + rows_of_block - 1) // rows_of_block
    return num_blocks * units_of_block, units_of_block, rows_of_block, panels_of_unit


@jit
def unit_at(index: int, units: Units, num_rows: int, num_outputs: int) -> tuple[int, int, int, int]:
    """First and end row, first and end panel."""
    _, units_of_block, rows_of_block, panels_of_unit = units
    first_row = index // units_of_block * rows_of_block
    first_panel = index % units_of_block * panels_of_unit
    num_panels = (num_outputs + PANEL - 1) // PANEL
    return (
        first_row,
        min(num_rows, first_row + rows_of_block),
        first_panel,
        min(num_panels, first_panel + panels_of_unit),
    )


@jit
def places_of_tile(
    panels: Panels, panel: int, row: int, is_gated: bool
) -> tuple[int, int, int, int]:
    """Addresses of the panel's scale and bias, offset and stride in y of its rows from `row` on."""
    num_outputs, first = panels[4], panel * PANEL
    scale_at, bias_at = panels[5] + 4 * first, panels[6] + 4 * first
    if is_gated:
        return scale_at, bias_at, (row * num_outputs + first) // 2, num_outputs // 2
    return scale_at, bias_at, row * num_outputs + first, num_outputs


@jit
def store_tile(
    tile_at: int,
    num_rows: int,
    panels: Panels,
    panel: int,
    y_at: Pointer,
    row: int,
    is_gated: bool,
) -> None:
    """Rows of a tile become rows of y, from `row` on."""
    scale_at, bias_at, offset, stride = places_of_tile(panels, panel, row, is_gated)
    if is_gated:
        store_gated_rows(num_rows, tile_at, scale_at, bias_at, y_at, offset, stride)
    elif is_whole(panels, panel):
        store_rows(num_rows, tile_at, scale_at, bias_at, y_at, offset, stride)
    else:
        scale, bias = floats(scale_at), floats(bias_at)
        for m in range(num_rows):
            sum_N = floats(tile_at + 4 * m * PANEL)
            y = flat(y_at, offset + m * stride)
            for n in range(panels[4] - panel * PANEL):
                y[n] = narrow(sum_N[n] * scale[n] + bias[n], y)


@jit
def is_whole(panels: Panels, panel: int) -> bool:
    """Whether all columns of the panel are outputs."""
    return (panel + 1) * PANEL <= panels[4]


@jit
def floats(address: int) -> Array:
    return flat((address, FLOAT_CELL), 0)
