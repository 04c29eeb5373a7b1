"""y = (silu(x G^T) * (x U^T)) D^T in one call: the SwiGLU MLP (arXiv:2002.05202).

Gate and up are packed side by side, half a panel of gates and then their ups, so that a tile of
sums holds both and the activation is taken before anything is stored.

Shapes: x_TE, gate_up_2IE, down_EI; h_TI float32 between the two products.
"""

import numpy as np
import torch
from torch import Tensor

from pageray.kernels.cpu.jit import jit, jit_threaded, num_threads, prange
from pageray.kernels.cpu.linear import MAX_PANEL_ROWS, multiplies_natively, pack_linear
from pageray.kernels.cpu.matmul import Panels, float_rows, multiply_units, panels_of
from pageray.kernels.cpu.memory import Pointer, pointer
from pageray.kernels.cpu.packed_weight import Pack, PackedWeight, pack_weight, pack_weight_int8
from pageray.kernels.cpu.silu_mul import silu_mul
from pageray.kernels.cpu.tile_product import HALF_PANEL
from pageray.kernels.ops import Linear


def pack_mlp(
    gate_up_2IE: Tensor, gate_up_bias: Tensor | None, down_EI: Tensor, down_bias: Tensor | None
) -> Linear:
    """Raises ValueError if shapes do not fit. Only packed forms are kept."""
    few_rows = _panel_mlp(gate_up_2IE, gate_up_bias, down_EI, down_bias, pack_weight)
    if not multiplies_natively(down_EI.dtype):
        return few_rows
    gate_up = pack_linear(gate_up_2IE, gate_up_bias)
    down = pack_linear(down_EI, down_bias)

    def mlp(x_TE: Tensor) -> Tensor:
        if x_TE.shape[0] <= MAX_PANEL_ROWS:
            return few_rows(x_TE)
        return down(silu_mul(gate_up(x_TE)))

    return mlp


def pack_mlp_int8(
    gate_up_2IE: Tensor, gate_up_bias: Tensor | None, down_EI: Tensor, down_bias: Tensor | None
) -> Linear:
    """Like `pack_mlp`, with weights of 8 bits and a scale per output."""
    return _panel_mlp(gate_up_2IE, gate_up_bias, down_EI, down_bias, pack_weight_int8)


def _panel_mlp(
    gate_up_2IE: Tensor,
    gate_up_bias: Tensor | None,
    down_EI: Tensor,
    down_bias: Tensor | None,
    pack: Pack,
) -> Linear:
    """The MLP on panels that `pack` makes."""
    num_hidden = down_EI.shape[1]
    if gate_up_2IE.shape[0] != 2 * num_hidden:
        raise ValueError(
            f"gate_up has shape {tuple(gate_up_2IE.shape)} and down {tuple(down_EI.shape)}; the "
            "rows of the first must be twice the columns of the second"
        )
    order = _interleaved(num_hidden)
    gate_up_2IE = _rows_or_zero(gate_up_2IE, order)
    if gate_up_bias is not None:
        gate_up_bias = _rows_or_zero(gate_up_bias, order)
    missing = gate_up_2IE.shape[0] // 2 - num_hidden
    down_EI = torch.nn.functional.pad(down_EI, (0, missing))
    return _PanelMlp(pack(gate_up_2IE, gate_up_bias), pack(down_EI, down_bias))


def _interleaved(num_hidden: int) -> Tensor:
    """Row of [gate; up] for each packed row; -1 where the last panel has none."""
    num_panels = -(-num_hidden // HALF_PANEL)
    hidden = torch.arange(num_panels * HALF_PANEL)
    gates = torch.where(hidden < num_hidden, hidden, -1).view(num_panels, HALF_PANEL)
    ups = torch.where(gates >= 0, gates + num_hidden, -1)
    return torch.cat((gates, ups), dim=1).flatten()


def _rows_or_zero(x: Tensor, order: Tensor) -> Tensor:
    """x[order], with zeros where order is -1."""
    rows = x[order.clamp(min=0)]
    rows[order < 0] = 0
    return rows


class _PanelMlp:
    def __init__(self, gate_up: PackedWeight, down: PackedWeight) -> None:
        self._gate_up, self._down = gate_up, down
        self._gate_up_panels, self._down_panels = panels_of(gate_up), panels_of(down)

    def __call__(self, x_TE: Tensor) -> Tensor:
        rows_TE = float_rows(x_TE, self._gate_up.num_inputs)
        num_rows = x_TE.shape[0]
        h_TI = torch.empty((num_rows, self._down.num_inputs))
        y_TE = torch.empty((num_rows, self._down.num_outputs), dtype=x_TE.dtype)
        args = (
            rows_TE.data_ptr(),
            rows_TE.stride(0),
            num_rows,
            self._gate_up_panels,
            self._down_panels,
            pointer(h_TI),
            pointer(y_TE),
        )
        num_parts = num_threads(self._down.panels_PEN.numel())
        if num_parts == 1:
            _mlp(*args)
        else:
            _mlp_threaded(*args, num_parts)
        return y_TE


@jit
def _mlp(
    x_at: int,
    x_stride: int,
    num_rows: int,
    gate_up: Panels,
    down: Panels,
    h_at: Pointer,
    y_at: Pointer,
) -> None:
    multiply_units(x_at, x_stride, num_rows, gate_up, h_at, True, 1, np.zeros(1, np.int64))
    multiply_units(h_at[0], down[3], num_rows, down, y_at, False, 1, np.zeros(1, np.int64))


@jit_threaded
def _mlp_threaded(
    x_at: int,
    x_stride: int,
    num_rows: int,
    gate_up: Panels,
    down: Panels,
    h_at: Pointer,
    y_at: Pointer,
    num_parts: int,
) -> None:
    gate_up_counter, down_counter = np.zeros(1, np.int64), np.zeros(1, np.int64)
    for _ in prange(num_parts):
        multiply_units(x_at, x_stride, num_rows, gate_up, h_at, True, num_parts, gate_up_counter)
    # Between the two loops every thread has finished: the second product reads all of h.
    for _ in prange(num_parts):
        multiply_units(h_at[0], down[3], num_rows, down, y_at, False, num_parts, down_counter)
