"""A tile's step of the online softmax for a few queries: `soften_scores.py` with keys in the lanes.

A decode has as many queries as heads share a KV head; side by side they would leave most lanes
empty. So scores are turned round, and weights stay float32: nothing here needs them in pairs.
"""

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pageray.kernels.cpu.soften_scores import DEGREE, LOWEST, next_reference
from pageray.kernels.cpu.turn_keys import turned
from pageray.kernels.cpu.vector_math import across, each, exp2, maximum
from pageray.kernels.cpu.vectors import (
    F32,
    I32,
    I64,
    LANES,
    broadcast,
    load_float_vector,
    loop,
    store_float_vector,
    zeros,
)

MAX_FEW_ROWS = 8
_ROWS_AT_ONCE = (4, MAX_FEW_ROWS)
_INTEGERS = ir.VectorType(I32, LANES)
_BIT = ir.IntType(1)
_ZERO, _ONE = ir.Constant(I64, 0), ir.Constant(I64, 1)


class _Softening:
    """Emits the code for any number of rows up to MAX_FEW_ROWS."""

    def __init__(self, builder: Any, args: tuple[ir.Value, ...]) -> None:
        self._builder = builder
        scores_at, self._width, rows_at, self._row_stride, self._num_rows = args[:5]
        self._first_key, self._num_keys, self._num_padded, seen_at, state_at = args[5:]
        self._scores = builder.inttoptr(scores_at, F32.as_pointer())
        self._rows = builder.inttoptr(rows_at, F32.as_pointer())
        self._seen = builder.inttoptr(seen_at, I32.as_pointer())
        self._state = builder.inttoptr(state_at, F32.as_pointer())

    def emit(self) -> ir.Value:
        """Returns whether a reference has moved, as i1."""
        builder = self._builder
        few, many = _ROWS_AT_ONCE
        are_few = builder.icmp_signed("<=", self._num_rows, ir.Constant(I64, few))
        with builder.if_else(are_few) as (then, otherwise):
            with then:
                self._turn(few)
            with otherwise:
                self._turn(many)

        def row(index: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
            return [builder.or_(carried[0], self._row(index))]

        return loop(builder, _ZERO, self._num_rows, 1, [ir.Constant(_BIT, 0)], row)[0]

    def _turn(self, num_rows: int) -> None:
        """LANES keys at a time, what lies past the last of them too."""
        builder = self._builder

        def some_keys(key: ir.Value, _: object) -> list[ir.Value]:
            start = builder.mul(key, self._width)
            vectors = [
                load_float_vector(
                    builder,
                    builder.gep(
                        self._scores,
                        [builder.add(start, builder.mul(self._width, ir.Constant(I64, j)))],
                    ),
                )
                for j in range(LANES)
            ]
            for row, vector in enumerate(turned(builder, vectors)[:num_rows]):
                place = builder.add(builder.mul(self._row_stride, ir.Constant(I64, row)), key)
                store_float_vector(builder, vector, builder.gep(self._rows, [place]))
            return []

        loop(builder, _ZERO, self._num_keys, LANES, [], some_keys)

    def _row(self, row: ir.Value) -> ir.Value:
        builder = self._builder
        start = builder.mul(row, self._row_stride)
        first, last = (broadcast(builder, self._number(self._seen, n, row)) for n in (0, 1))
        end = builder.trunc(builder.add(self._first_key, self._num_keys), I32)
        end = broadcast(builder, builder.sub(end, ir.Constant(I32, 1)))
        last = builder.select(builder.icmp_signed("<", last, end), last, end)
        lanes = ir.Constant(_INTEGERS, list(range(LANES)))

        def place_of(key: ir.Value) -> ir.Value:
            return builder.gep(self._rows, [builder.add(start, key)])

        def take_largest(key: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
            number = broadcast(builder, builder.trunc(builder.add(self._first_key, key), I32))
            number = builder.add(number, lanes)
            is_seen = builder.and_(
                builder.icmp_signed(">=", number, first), builder.icmp_signed("<=", number, last)
            )
            score = load_float_vector(builder, place_of(key))
            score = builder.select(is_seen, score, each(LOWEST))
            store_float_vector(builder, score, place_of(key))
            return [maximum(builder, carried[0], score)]

        largest = loop(builder, _ZERO, self._num_padded, LANES, [each(LOWEST)], take_largest)[0]
        largest = across(builder, maximum, largest)
        before, total = (
            broadcast(builder, self._number(self._state, number, row)) for number in (0, 1)
        )
        grown, reference, finite, factor = next_reference(builder, before, largest)

        def weigh(key: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
            keys = (key, builder.add(key, ir.Constant(I64, LANES)))
            weights = [
                exp2(
                    builder,
                    builder.fsub(load_float_vector(builder, place_of(k)), finite),
                    DEGREE,
                )
                for k in keys
            ]
            for k, weight in zip(keys, weights, strict=True):
                store_float_vector(builder, weight, place_of(k))
            return [builder.fadd(a, b) for a, b in zip(carried, weights, strict=True)]

        totals = loop(builder, _ZERO, self._num_padded, 2 * LANES, [zeros(), zeros()], weigh)
        new = across(builder, lambda b, x, y: b.fadd(x, y), builder.fadd(*totals))
        total = builder.fadd(builder.fmul(total, factor), new)
        for number, vector in enumerate((reference, total, factor)):
            value = builder.extract_element(vector, ir.Constant(I32, 0))
            builder.store(value, self._place(self._state, number, row))
        return builder.extract_element(grown, ir.Constant(I32, 0))

    def _place(self, base: ir.Value, number: int, row: ir.Value) -> ir.Value:
        """Of a row's number in a table with a row of `width` for each kind of them."""
        offset = self._builder.mul(self._width, ir.Constant(I64, number))
        return self._builder.gep(base, [self._builder.add(offset, row)])

    def _number(self, base: ir.Value, number: int, row: ir.Value) -> ir.Value:
        return self._builder.load(self._place(base, number, row))


def _typing(  # Numba passes arguments by position
    _: object,
    scores_at: types.Type,
    width: types.Type,
    rows_at: types.Type,
    row_stride: types.Type,
    num_rows: types.Type,
    first_key: types.Type,
    num_keys: types.Type,
    num_padded: types.Type,
    seen_at: types.Type,
    state_at: types.Type,
) -> tuple[Any, Any]:
    signature: Any = cast("Any", types.boolean)(
        scores_at,
        width,
        rows_at,
        row_stride,
        num_rows,
        first_key,
        num_keys,
        num_padded,
        seen_at,
        state_at,
    )

    def lower(_: Any, builder: Any, __: Any, args: tuple[ir.Value, ...]) -> Any:
        return _Softening(builder, args).emit()

    return signature, lower


soften_rows = cast(
    "Callable[[int, int, int, int, int, int, int, int, int, int], bool]",
    intrinsic(_typing),
)
"""(scores address, width; rows address, their stride; num_rows, first key, num_keys, padded keys;
seen address, state address) -> whether any reference has moved.

scores, seen and state are those of `soften_scores`, for num_rows <= MAX_FEW_ROWS queries. rows gets
the weights, float32 [num_rows, padded keys], and is room for MAX_FEW_ROWS; padded keys is a multiple
of 2 LANES.
"""
