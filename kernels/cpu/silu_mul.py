"""y = silu(gate) * up, silu(x) = x / (1 + exp(-x)): the SwiGLU gate (arXiv:2002.05202)."""

import torch
from torch import Tensor

from pageray.kernels.cpu.jit import jit, jit_threaded, num_threads, part, prange
from pageray.kernels.cpu.memory import Pointer, flat, pointer, require_float
from pageray.kernels.cpu.numerics import narrow, sigmoid, widen


def silu_mul(gate_up_T2I: Tensor) -> Tensor:
    """A new contiguous [T, I] tensor of the input's dtype; gate is the first half of a row."""
    require_float("gate_up", gate_up_T2I)
    if gate_up_T2I.dim() != 2 or gate_up_T2I.shape[1] % 2:
        raise ValueError(f"gate_up has shape {tuple(gate_up_T2I.shape)}; it must be (T, 2 * I)")
    num_tokens, width = gate_up_T2I.shape[0], gate_up_T2I.shape[1] // 2
    y_TI = torch.empty((num_tokens, width), dtype=gate_up_T2I.dtype)
    args = (pointer(gate_up_T2I), gate_up_T2I.stride(0), pointer(y_TI), width)
    num_parts = num_threads(y_TI.numel())
    if num_parts == 1:
        _gate_rows(*args, 0, num_tokens)
    else:
        _gate_rows_threaded(*args, num_tokens, num_parts)
    return y_TI


@jit
def _gate_rows(
    x_at: Pointer, x_stride: int, y_at: Pointer, width: int, start: int, stop: int
) -> None:
    for row in range(start, stop):
        gates, ups = flat(x_at, row * x_stride), flat(x_at, row * x_stride + width)
        y = flat(y_at, row * width)
        for i in range(width):
            gate, up = widen(gates[i]), widen(ups[i])
            y[i] = narrow(gate * sigmoid(gate) * up, y)


@jit_threaded
def _gate_rows_threaded(
    x_at: Pointer, x_stride: int, y_at: Pointer, width: int, num_rows: int, num_parts: int
) -> None:
    for index in prange(num_parts):
        start, stop = part(num_rows, num_parts, index)
        _gate_rows(x_at, x_stride, y_at, width, start, stop)
