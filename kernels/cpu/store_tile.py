"""From the sums of a tile to rows of y: scale, bias, the gate if there is one, and rounding."""

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pageray.kernels.cpu.memory import Pointer
from pageray.kernels.cpu.tile_product import PANEL
from pageray.kernels.cpu.vector_math import silu
from pageray.kernels.cpu.vectors import (
    F32,
    I64,
    LANES,
    load_float_vector,
    loop,
    multiply_add,
    storage_type,
    store_vector,
)

Finish = Callable[[Any, list[ir.Value]], list[ir.Value]]
"""From the vectors of a row of the panel to those that are stored."""


def plain(_: Any, vectors: list[ir.Value]) -> list[ir.Value]:
    return vectors


def gated(builder: Any, vectors: list[ir.Value]) -> list[ir.Value]:
    gate, up = vectors
    return [builder.fmul(silu(builder, gate), up)]


class RowStore:
    """Emits the code for a row of a tile. `args` are those of `store_rows` after the first."""

    def __init__(self, builder: Any, finish: Finish, cell: Any, args: tuple[ir.Value, ...]) -> None:
        tile_at, scale_at, bias_at, y_pointer, y_offset, self._stride = args
        self._builder = builder
        self._finish = finish
        self._cell = cell
        address = builder.extract_value(y_pointer, 0)
        y = builder.inttoptr(address, storage_type(cell).as_pointer())
        self._y = builder.gep(y, [y_offset])
        self._tile = builder.inttoptr(tile_at, F32.as_pointer())
        self._scales, self._biases = _vectors(builder, scale_at), _vectors(builder, bias_at)

    def emit(self, index: ir.Value) -> None:
        builder = self._builder
        start = builder.mul(index, ir.Constant(I64, PANEL))
        sums = _vectors_from(builder, builder.gep(self._tile, [start]))
        results = [
            multiply_add(builder, total, scale, bias)
            for total, scale, bias in zip(sums, self._scales, self._biases, strict=True)
        ]
        target = builder.gep(self._y, [builder.mul(index, self._stride)])
        for number, vector in enumerate(self._finish(builder, results)):
            at = builder.gep(target, [ir.Constant(I64, number * LANES)])
            store_vector(builder, self._cell, vector, at)


def _intrinsic(finish: Finish) -> Any:
    def typing(  # Numba passes arguments by position
        _: object,
        num_rows: types.Type,
        tile_at: types.Type,
        scale_at: types.Type,
        bias_at: types.Type,
        y_at: types.Type,
        y_offset: types.Type,
        y_stride: types.Type,
    ) -> tuple[Any, Any]:
        signature: Any = cast("Any", types.void)(
            num_rows, tile_at, scale_at, bias_at, y_at, y_offset, y_stride
        )

        def lower(context: Any, builder: Any, signature: Any, args: tuple[ir.Value, ...]) -> Any:
            num_rows, *of_store = args
            store = RowStore(builder, finish, signature.args[4].types[1], tuple(of_store))

            def row(index: ir.Value, _: object) -> list[ir.Value]:
                store.emit(index)
                return []

            loop(builder, ir.Constant(I64, 0), num_rows, 1, [], row)
            return context.get_dummy_value()

        return signature, lower

    return intrinsic(typing)


def _vectors(builder: Any, address: ir.Value) -> list[ir.Value]:
    return _vectors_from(builder, builder.inttoptr(address, F32.as_pointer()))


def _vectors_from(builder: Any, at: ir.Value) -> list[ir.Value]:
    return [
        load_float_vector(builder, builder.gep(at, [ir.Constant(I64, start)]))
        for start in range(0, PANEL, LANES)
    ]


_Store = Callable[[int, int, int, int, Pointer, int, int], None]

store_rows = cast("_Store", _intrinsic(plain))
"""(num_rows, tile address, scale address, bias address, y pointer, y offset, y stride).

y[m, n] = tile[m, n] * scale[n] + bias[n], for n < PANEL. Addresses in bytes; offset and stride in
elements of y. Tile, scale and bias are float32, the tile's rows dense.
"""

store_gated_rows = cast("_Store", _intrinsic(gated))
"""The same, but y[m, n] = silu(gate) * up for n < HALF_PANEL, where gate is what `store_rows` would
have at n, and up what it would have at HALF_PANEL + n."""
