"""How tensors reach the compiled kernels, and the checks that come before.

A kernel gets pointers and strides, as a GPU kernel does: making a NumPy view costs 2 us a tensor,
and the smaller operations do not take that long. A pointer is an address and a *cell*, a NumPy
scalar whose dtype says what is stored there:

    float32 -> float32, bfloat16 -> uint16, float16 -> int16, int8 -> int8, int32 -> int32, ...

NumPy knows no bfloat16 and Numba no float16: their bits travel in integers, and
`numerics.widen` turns them into numbers.

An address keeps nothing alive: Numba frees an array after its last use by name, so memory that is
reached by address alone belongs to a tensor that the caller holds, or to an array that is used
again by name afterwards.
"""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numba.np import numpy_support
from torch import Tensor

from pageray.kernels.cpu.jit import jit

Array = npt.NDArray[Any]
"""A flat view inside a kernel."""
Cell = np.generic
Pointer = tuple[int, Cell]

FLOAT_CELL: Cell = np.float32(0)
"""Beside an address it makes a pointer to float32."""
BFLOAT16_CELL: Cell = np.uint16(0)
"""The same for bfloat16."""
PAIR_CELL: Cell = np.int32(0)
"""The same for two bfloat16 side by side."""
INDEX_CELL: Cell = np.int64(0)
"""The same for an index or an address."""

ALIGNMENT = 64
"""Bytes of a cache line."""

_CELLS: dict[torch.dtype, Cell] = {
    torch.float32: FLOAT_CELL,
    torch.bfloat16: BFLOAT16_CELL,
    torch.float16: np.int16(0),
    torch.float64: np.float64(0),
    torch.int8: np.int8(0),
    torch.int32: np.int32(0),
    torch.int64: np.int64(0),
}
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# A flat view has no bounds of its own: addresses and strides say what is read.
_UNBOUNDED = 1 << 62


def pointer(tensor: Tensor) -> Pointer:
    """To the tensor's first element; the caller keeps the tensor alive. Raises ValueError for a
    tensor that is not on the CPU."""
    if not tensor.is_cpu:
        raise ValueError(f"the CPU kernels got a tensor on {tensor.device}; use its device's ops")
    return tensor.data_ptr(), _CELLS[tensor.dtype]


def _pointer_typing(
    _: object, __: types.Type, ___: types.Type, like: types.Type
) -> tuple[Any, Any]:
    def lower(context: Any, builder: Any, signature: Any, args: tuple[ir.Value, ...]) -> Any:
        first = builder.inttoptr(args[0], context.get_value_type(signature.return_type))
        return builder.gep(first, [args[1]])

    return types.CPointer(like)(types.intp, types.intp, like), lower


_typed_pointer = cast("Callable[[int, int, Cell], object]", intrinsic(_pointer_typing))
_as_array = cast("Callable[[object, tuple[int]], Array]", numpy_support.carray)


@jit
def flat(at: Pointer, offset: int) -> Array:
    """The memory from `offset` elements past a pointer on, as an array of the cell's dtype.

    Costs nothing. A loop vectorises if its arrays are made so that the bare loop variable indexes
    them; with a sum as the index Numba has to allow for a negative one, counted from the end.
    """
    return _as_array(_typed_pointer(at[0], offset, at[1]), (_UNBOUNDED,))


@jit
def past(at: Pointer, offset: int) -> Pointer:
    """A pointer `offset` elements on."""
    return at[0] + offset * flat(at, 0).itemsize, at[1]


@jit
def aligned(address: int) -> int:
    """The first multiple of ALIGNMENT from an address on."""
    return (address + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


@jit
def first_outside(at: Pointer, count: int, low: int, high: int) -> int:
    """Index of the first of `count` integers that is not in low .. high - 1; -1 if there is none."""
    values = flat(at, 0)
    for index in range(count):
        if values[index] < low or values[index] >= high:
            return index
    return -1


def require_shape(name: str, tensor: Tensor, *shape: int) -> None:
    """Raise ValueError unless `tensor` has exactly `shape`."""
    if tensor.shape != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be {shape}")


def require_float(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless `tensor` is float32, bfloat16 or float16 with dense last dim."""
    if tensor.dtype not in _FLOATS:
        raise ValueError(f"{name} is {tensor.dtype}; it must be float32, bfloat16 or float16")
    require_dense_rows(name, tensor)


def require_dtype(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError unless `tensor` has `dtype` and a dense last dim."""
    if tensor.dtype is not dtype:
        raise ValueError(f"{name} is {tensor.dtype}; it must be {dtype}")
    require_dense_rows(name, tensor)


def require_dense_rows(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless the last dim has stride 1: the kernels' inner loops run along it."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(
            f"{name} has stride {tensor.stride(-1)} along its last dim; it must be 1 "
            "(call .contiguous() where the tensor is made)"
        )


def require_in_range(name: str, values: Tensor, low: int, high: int) -> None:
    """Raise ValueError unless every element of the 1-D integers is in low .. high - 1."""
    index = first_outside(pointer(values), values.shape[0], low, high)
    if index >= 0:
        raise ValueError(
            f"{name}[{index}] is {values[index].item()}; it must be in {low} .. {high - 1}"
        )
