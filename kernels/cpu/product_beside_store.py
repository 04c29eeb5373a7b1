"""A tile's product on matrix registers while the tile before it is stored.

The two do not wait for each other: a product keeps the matrix unit busy and leaves the vector units
idle, and a store the other way round. A processor that executes out of order overlaps them only if
they are a few hundred instructions apart, so rows are stored between the steps of the product.
"""

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pageray.kernels.cpu.matrix_tile import (
    HAS_MATRIX_REGISTERS,
    MATRIX_DEPTH,
    MAX_MATRIX_COLUMNS,
    Beside,
    Habit,
    ProductValues,
    emit_product,
)
from pageray.kernels.cpu.memory import Pointer
from pageray.kernels.cpu.store_tile import Finish, RowStore, gated, plain
from pageray.kernels.cpu.vectors import I64, loop

_PAIRS = MATRIX_DEPTH // 2
_COLUMNS = 2
"""Registers of MAX_MATRIX_COLUMNS, a panel."""


def _intrinsic(finish: Finish, habit: Habit) -> Any:
    def typing(  # Numba passes arguments by position
        _: object,
        num_rows: types.Type,
        x_at: types.Type,
        x_strides: types.Type,
        num_parts: types.Type,
        w_at: types.Type,
        depth: types.Type,
        out_at: types.Type,
        adds: types.Type,
        stored_rows: types.Type,
        stored_at: types.Type,
        scale_at: types.Type,
        bias_at: types.Type,
        y_at: types.Type,
        y_offset: types.Type,
        y_stride: types.Type,
    ) -> tuple[Any, Any]:
        signature: Any = cast("Any", types.void)(
            num_rows,
            x_at,
            x_strides,
            num_parts,
            w_at,
            depth,
            out_at,
            adds,
            stored_rows,
            stored_at,
            scale_at,
            bias_at,
            y_at,
            y_offset,
            y_stride,
        )

        def lower(context: Any, builder: Any, signature: Any, args: tuple[ir.Value, ...]) -> Any:
            if HAS_MATRIX_REGISTERS:
                num_rows, x_at, x_strides, num_parts, w_at, depth, out_at, adds = args[:8]
                values = ProductValues(
                    x_at=x_at,
                    x_stride=builder.extract_value(x_strides, 0),
                    part_stride=builder.extract_value(x_strides, 1),
                    num_parts=num_parts,
                    w_at=w_at,
                    depth=depth,
                    out_at=out_at,
                    out_stride=ir.Constant(I64, MAX_MATRIX_COLUMNS),
                    adds=adds,
                )
                store = RowStore(builder, finish, signature.args[12].types[1], args[9:])
                beside = _rows_beside(builder, store, args[8], depth)
                emit_product(builder, num_rows, _COLUMNS, values, habit, beside)
            return context.get_dummy_value()

        return signature, lower

    return intrinsic(typing)


def _rows_beside(builder: Any, store: RowStore, num_rows: ir.Value, depth: ir.Value) -> Beside:
    """As many rows a step as there must be for the last step to end with the last row."""
    one, pairs = ir.Constant(I64, 1), ir.Constant(I64, _PAIRS)
    num_steps = builder.sdiv(depth, pairs)
    of_step = builder.sdiv(builder.sub(builder.add(num_rows, num_steps), one), num_steps)

    def beside(pair: ir.Value) -> None:
        start = builder.mul(builder.sdiv(pair, pairs), of_step)
        stop = builder.add(start, of_step)
        stop = builder.select(builder.icmp_signed("<", stop, num_rows), stop, num_rows)

        def row(index: ir.Value, _: object) -> list[ir.Value]:
            store.emit(index)
            return []

        loop(builder, start, stop, 1, [], row)

    return beside


_ProductBesideStore = Callable[
    [
        int,
        int,
        tuple[int, int],
        int,
        int,
        int,
        int,
        bool,
        int,
        int,
        int,
        int,
        Pointer,
        int,
        int,
    ],
    None,
]
_NEW_WEIGHTS, _PASSING_ROWS = Habit(asks_for_weights=True), Habit(rows_pass=True)

multiply_new_and_store = cast("_ProductBesideStore", _intrinsic(plain, _NEW_WEIGHTS))
"""(num_rows, x address, (stride of x, of its parts), num_parts, w address, depth, out address, adds;
stored rows, tile address, scale address, bias address, y pointer, y offset, y stride).

The product, for a panel of MAX_MATRIX_COLUMNS, is that of `matrix_product`, with rows of out dense,
summed over the parts of x too; depth is MATRIX_DEPTH / 2 or more. The store, of another tile than
`out`, is that of `store_rows`. This one is for a w that is not in a cache yet, and more of it lies
behind it.
"""

multiply_new_and_store_gated = cast("_ProductBesideStore", _intrinsic(gated, _NEW_WEIGHTS))
"""The same with the store of `store_gated_rows`."""

multiply_and_store = cast("_ProductBesideStore", _intrinsic(plain, _PASSING_ROWS))
"""The first for a w that stays in the first-level cache while many rows of x meet it."""

multiply_and_store_gated = cast("_ProductBesideStore", _intrinsic(gated, _PASSING_ROWS))
"""That with the store of `store_gated_rows`."""
