"""One layer's MLP in one call: residual += x; n = rms_norm(residual);
y = (silu(n G^T) * (n U^T)) D^T (SwiGLU, arXiv:2002.05202).

Gate and up are packed side by side, half a panel of gates and then their ups, so that a tile of
sums holds both and the activation is taken before anything is stored. n and what lies between the
products is float32, or rounded to bfloat16 once where the products take that.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from pageray.kernels.cpu.jit import all_threads, jit, jit_threaded, num_threads, part, prange
from pageray.kernels.cpu.matmul import multiply_in_threads, multiply_units
from pageray.kernels.cpu.memory import Array, Pointer, past, pointer
from pageray.kernels.cpu.operand import Operand, Rows, cut_rows, rows_from, written
from pageray.kernels.cpu.packed_weight import Pack
from pageray.kernels.cpu.panels import Panels, addresses_of, kind_of, panels_of
from pageray.kernels.cpu.residual import check_residual
from pageray.kernels.cpu.rms_norm import add_and_norm_rows
from pageray.kernels.cpu.row_blocks import WHOLE, rows_of_block
from pageray.kernels.cpu.tile_product import HALF_PANEL
from pageray.kernels.cpu.work_counter import fetch_add_one, new_counters
from pageray.kernels.ops import MlpWeights

MlpAddresses = tuple[int, int, int, int, int, int, int]
"""Of the norm, of gate and up, and of down (as `addresses_of` has them)."""

MlpArguments = tuple[
    Pointer,
    Pointer,
    tuple[int, int, float],
    Panels,
    Panels,
    Rows,
    Rows,
    Pointer,
    tuple[int, int, int],
]
"""Those of `run_mlp`, by its names, all but x."""


class FusedMlp:
    """The block on panels that `pack` makes. Raises ValueError if shapes do not fit."""

    def __init__(self, weights: MlpWeights, pack: Pack) -> None:
        weights = _interleaved(weights)
        self._norm_E, self._eps = weights.norm_E, weights.eps
        self._gate_up = pack(weights.gate_up_2IE, weights.gate_up_bias_2I)
        self._down = pack(weights.down_EI, weights.down_bias_E)
        self._panels = panels_of(self._gate_up), panels_of(self._down)

    def __call__(self, x_TE: Tensor, residual_TE: Tensor) -> Tensor:
        check_residual(x_TE, residual_TE, self._gate_up.num_inputs)
        y_TE = torch.empty(residual_TE.shape, dtype=residual_TE.dtype)
        operands = self.operands(residual_TE.shape[0])
        run_mlp(x_TE.data_ptr(), *self.arguments(operands, residual_TE, y_TE))
        return y_TE

    def operands(self, num_rows: int) -> tuple[Operand, Operand]:
        """Room for what gate and up read, and for what down does: of all rows, or of a block for
        each thread."""
        block = self._rows_of_block(num_rows)
        room = num_rows if block == WHOLE else all_threads() * block
        return Operand(room, self._gate_up), Operand(room, self._down)

    def _rows_of_block(self, num_rows: int) -> int:
        bytes_per_row = self._gate_up.operand_bytes + self._down.operand_bytes
        return rows_of_block(num_rows, bytes_per_row, all_threads())

    def arguments(
        self, operands: tuple[Operand, Operand], residual_TE: Tensor, y_TE: Tensor
    ) -> MlpArguments:
        """What `run_mlp` takes after the address of x; the caller keeps all of it alive."""
        normed, hidden = operands
        num_rows, width = residual_TE.shape
        return (
            pointer(residual_TE),
            pointer(self._norm_E),
            (num_rows, width, self._eps),
            *self._panels,
            normed.rows,
            hidden.rows,
            pointer(y_TE),
            (num_threads(residual_TE.numel()), all_threads(), self._rows_of_block(num_rows)),
        )

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for layers that differ in nothing but the numbers of their weights."""
        return *map(kind_of, self._panels), self._norm_E.dtype, self._eps

    @property
    def addresses(self) -> MlpAddresses:
        gate_up, down = self._panels
        return self._norm_E.data_ptr(), *addresses_of(gate_up), *addresses_of(down)


def _interleaved(weights: MlpWeights) -> MlpWeights:
    """The same with rows of gate and up in the order of half panels, and zeros where the last has
    none."""
    num_hidden = weights.down_EI.shape[1]
    if weights.gate_up_2IE.shape[0] != 2 * num_hidden:
        raise ValueError(
            f"gate_up has shape {tuple(weights.gate_up_2IE.shape)} and down "
            f"{tuple(weights.down_EI.shape)}; the rows of the first must be twice the columns of "
            "the second"
        )
    num_panels = -(-num_hidden // HALF_PANEL)
    hidden = torch.arange(num_panels * HALF_PANEL)
    gates = torch.where(hidden < num_hidden, hidden, -1).view(num_panels, HALF_PANEL)
    ups = torch.where(gates >= 0, gates + num_hidden, -1)
    order = torch.cat((gates, ups), dim=1).flatten()
    bias = weights.gate_up_bias_2I
    return replace(
        weights,
        gate_up_2IE=_rows_or_zero(weights.gate_up_2IE, order),
        gate_up_bias_2I=None if bias is None else _rows_or_zero(bias, order),
        down_EI=functional.pad(weights.down_EI, (0, len(hidden) - num_hidden)),
    )


def _rows_or_zero(x: Tensor, order: Tensor) -> Tensor:
    """x[order], with zeros where order is -1."""
    rows = x[order.clamp(min=0)]
    rows[order < 0] = 0
    return rows


@jit
def _run_blocks(
    x_address: int,
    residual_at: Pointer,
    norm_at: Pointer,
    shape: tuple[int, int, float],
    gate_up: Panels,
    down: Panels,
    normed: Rows,
    hidden: Rows,
    y_at: Pointer,
    rows_of_block: int,
    blocks: Array,
    units: Array,
) -> None:
    """One thread's share: take blocks off the first counter until there are none; the second is for
    the products of a block."""
    num_rows, width, eps = shape
    num_hidden = gate_up[4] // 2
    _, _, normed_at, normed_stride, _ = normed
    _, _, hidden_at, hidden_stride, _ = hidden
    start = fetch_add_one(blocks) * rows_of_block
    while start < num_rows:
        rows = min(rows_of_block, num_rows - start)
        block_at, out_at = past(residual_at, start * width), past(y_at, start * width)
        block_address = x_address + block_at[0] - residual_at[0]
        add_and_norm_rows(block_address, block_at, norm_at, written(normed), width, eps, 0, rows)
        cut_rows(normed, width, 0, rows)
        units[0] = 0
        multiply_units(normed_at, normed_stride, rows, gate_up, written(hidden), True, 1, units)
        cut_rows(hidden, num_hidden, 0, rows)
        units[0] = 0
        multiply_units(hidden_at, hidden_stride, rows, down, out_at, False, 1, units)
        start = fetch_add_one(blocks) * rows_of_block


@jit_threaded
def run_mlp(
    x_address: int,
    residual_at: Pointer,
    norm_at: Pointer,
    shape: tuple[int, int, float],
    gate_up: Panels,
    down: Panels,
    normed: Rows,
    hidden: Rows,
    y_at: Pointer,
    parts: tuple[int, int, int],
) -> None:
    num_rows, width, eps = shape
    num_row_parts, num_parts, rows_of_block = parts
    _, _, normed_at, normed_stride, _ = normed
    _, _, hidden_at, hidden_stride, num_hidden_cuts = hidden
    num_hidden = gate_up[4] // 2
    if rows_of_block != WHOLE:
        counters = new_counters(1 + num_parts)
        for index in prange(num_parts):
            room = index * rows_of_block
            _run_blocks(
                x_address,
                residual_at,
                norm_at,
                shape,
                gate_up,
                down,
                rows_from(normed, width, room),
                rows_from(hidden, num_hidden, room),
                y_at,
                rows_of_block,
                counters[0],
                counters[1 + index],
            )
        return
    # A loop ends when every thread has finished, so each may read all that the one before wrote.
    if num_row_parts == 1:
        add_and_norm_rows(x_address, residual_at, norm_at, written(normed), width, eps, 0, num_rows)
        cut_rows(normed, width, 0, num_rows)
    else:
        for index in prange(num_row_parts):
            start, stop = part(num_rows, num_row_parts, index)
            add_and_norm_rows(
                x_address, residual_at, norm_at, written(normed), width, eps, start, stop
            )
            cut_rows(normed, width, start, stop)
    multiply_in_threads(
        normed_at, normed_stride, num_rows, gate_up, written(hidden), True, num_parts
    )
    if num_hidden_cuts > 0:
        for index in prange(num_parts):
            start, stop = part(num_rows, num_parts, index)
            cut_rows(hidden, num_hidden, start, stop)
    multiply_in_threads(hidden_at, hidden_stride, num_rows, down, y_at, False, num_parts)
