"""RoPE of one head straight from its source to its place, in vectors.

The same formula as `head_buffer.rotate_head`, for heads that are rotated as a whole and whose halves
fill vectors, which is nearly every model's.
"""

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pageray.kernels.cpu.jit import jit
from pageray.kernels.cpu.memory import Pointer
from pageray.kernels.cpu.vectors import (
    F32,
    I64,
    LANES,
    broadcast,
    load_float_vector,
    load_vector,
    loop,
    multiply_add,
    storage_type,
    store_vector,
)

_ZERO = ir.Constant(I64, 0)


def _element(builder: Any, cell: Any, pointer: ir.Value, offset: ir.Value) -> ir.Value:
    address = builder.extract_value(pointer, 0)
    return builder.gep(builder.inttoptr(address, storage_type(cell).as_pointer()), [offset])


def _turn(  # Numba passes arguments by position
    _: object,
    x_at: types.Type,
    x_offset: types.Type,
    angles_at: types.Type,
    half: types.Type,
    y_at: types.Type,
    y_offset: types.Type,
    gain: types.Type,
) -> tuple[Any, Any]:
    signature: Any = cast("Any", types.void)(x_at, x_offset, angles_at, half, y_at, y_offset, gain)

    def lower(context: Any, builder: Any, signature: Any, args: tuple[ir.Value, ...]) -> Any:
        x_pointer, x_offset, angles_at, half, y_pointer, y_offset, gain = args
        x_cell, y_cell = signature.args[0].types[1], signature.args[4].types[1]
        x = _element(builder, x_cell, x_pointer, x_offset)
        y = _element(builder, y_cell, y_pointer, y_offset)
        angles = builder.inttoptr(angles_at, F32.as_pointer())
        gains = broadcast(builder, gain)

        def turn(i: ir.Value, _: object) -> list[ir.Value]:
            j = builder.add(half, i)
            low, high = (load_vector(builder, x_cell, builder.gep(x, [at])) for at in (i, j))
            cosines, sines = (
                load_float_vector(builder, builder.gep(angles, [at])) for at in (i, j)
            )
            minus = builder.fneg(builder.fmul(high, sines))
            turned_low = multiply_add(builder, low, cosines, minus)
            turned_high = multiply_add(builder, high, cosines, builder.fmul(low, sines))
            for vector, at in ((turned_low, i), (turned_high, j)):
                store_vector(builder, y_cell, builder.fmul(vector, gains), builder.gep(y, [at]))
            return []

        loop(builder, _ZERO, half, LANES, [], turn)
        return context.get_dummy_value()

    return signature, lower


def _copy(  # Numba passes arguments by position
    _: object,
    x_at: types.Type,
    x_offset: types.Type,
    head_dim: types.Type,
    y_at: types.Type,
    y_offset: types.Type,
    gain: types.Type,
) -> tuple[Any, Any]:
    signature: Any = cast("Any", types.void)(x_at, x_offset, head_dim, y_at, y_offset, gain)

    def lower(context: Any, builder: Any, signature: Any, args: tuple[ir.Value, ...]) -> Any:
        x_pointer, x_offset, head_dim, y_pointer, y_offset, gain = args
        x_cell, y_cell = signature.args[0].types[1], signature.args[3].types[1]
        x = _element(builder, x_cell, x_pointer, x_offset)
        y = _element(builder, y_cell, y_pointer, y_offset)
        gains = broadcast(builder, gain)

        def move(i: ir.Value, _: object) -> list[ir.Value]:
            vector = load_vector(builder, x_cell, builder.gep(x, [i]))
            store_vector(builder, y_cell, builder.fmul(vector, gains), builder.gep(y, [i]))
            return []

        loop(builder, _ZERO, head_dim, LANES, [], move)
        return context.get_dummy_value()

    return signature, lower


turn_head = cast("Callable[[Pointer, int, int, int, Pointer, int, float], None]", intrinsic(_turn))
"""(x pointer, x offset, address of cosines and then sines, half, y pointer, y offset, gain):
y = the head at x, turned, times gain. Offsets in elements; y may be x."""

copy_head = cast("Callable[[Pointer, int, int, Pointer, int, float], None]", intrinsic(_copy))
"""(x pointer, x offset, head_dim, y pointer, y offset, gain): y = x times gain."""


@jit
def fills_vectors(half: int, head_dim: int) -> bool:
    """Whether heads of this dim, of which 2 `half` are rotated, are moved here."""
    return 2 * half == head_dim and half % LANES == 0
