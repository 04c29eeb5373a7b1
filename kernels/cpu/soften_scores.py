"""A tile's step of the online softmax for queries that lie side by side, one in each lane.

No lane waits for another: every largest, sum and factor is taken down the column of its query. The
reference that scores are taken from is not always the largest so far: it follows only when that has
grown by more than _SLACK, so that sums are seldom rescaled. Any reference gives the same softmax.
"""

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pageray.kernels.cpu.vector_math import each, exp2, maximum
from pageray.kernels.cpu.vectors import (
    F32,
    I32,
    I64,
    LANES,
    VECTOR,
    broadcast,
    loop,
    narrow_to_pairs,
    zeros,
)

_SLACK = 8.0
"""In powers of two: weights stay below 256, sums of thousands of them far below what float32 holds."""
_DEGREE = 4
"""Of the polynomial of 2^x; weights are rounded to 8 bits next."""
_INTEGERS = ir.VectorType(I32, LANES)
_BIT = ir.IntType(1)
_ZERO = ir.Constant(I64, 0)
_LOWEST = float("-inf")


class _Softening:
    """Emits the code for the tile's keys and any number of columns."""

    def __init__(self, builder: Any, args: tuple[ir.Value, ...]) -> None:
        self._builder = builder
        scores_at, weights_at, self._width, self._first_key, self._num_keys = args[:5]
        self._num_pairs, self._all_seen, seen_at, state_at = args[5:]
        self._scores = builder.inttoptr(scores_at, F32.as_pointer())
        self._weights = builder.inttoptr(weights_at, I32.as_pointer())
        self._seen = builder.inttoptr(seen_at, I32.as_pointer())
        self._state = builder.inttoptr(state_at, F32.as_pointer())

    def emit(self) -> ir.Value:
        """Returns whether a reference has moved, as i1."""
        builder = self._builder

        def columns(start: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
            with builder.if_else(self._all_seen) as (whole, masked):
                with whole:
                    of_whole, end_of_whole = self._columns(start, None), builder.block
                with masked:
                    of_masked, end_of_masked = self._masked_columns(start), builder.block
            moved = builder.phi(_BIT)
            moved.add_incoming(of_whole, end_of_whole)
            moved.add_incoming(of_masked, end_of_masked)
            return [builder.or_(carried[0], moved)]

        none = ir.Constant(_BIT, 0)
        return loop(builder, _ZERO, self._width, LANES, [none], columns)[0]

    def _masked_columns(self, start: ir.Value) -> ir.Value:
        builder = self._builder
        first, last = (
            builder.load(self._at(self._seen, row, start, _INTEGERS), align=4) for row in (0, 1)
        )
        # What lies past the tile's keys belongs to nobody, even where the next tile's are seen.
        end = builder.trunc(builder.add(self._first_key, self._num_keys), I32)
        end = broadcast(builder, builder.sub(end, ir.Constant(I32, 1)))
        last = builder.select(builder.icmp_signed("<", last, end), last, end)

        def is_seen(key: ir.Value) -> ir.Value:
            number = broadcast(builder, builder.trunc(builder.add(self._first_key, key), I32))
            return builder.and_(
                builder.icmp_signed(">=", number, first), builder.icmp_signed("<=", number, last)
            )

        return self._columns(start, is_seen)

    def _columns(self, start: ir.Value, is_seen: Callable[[ir.Value], ir.Value] | None) -> ir.Value:
        """LANES queries from `start` on; without `is_seen` they see every key."""
        builder = self._builder
        before, total = (self._load(self._state, ir.Constant(I64, row), start) for row in (0, 1))

        def score(key: ir.Value) -> ir.Value:
            return self._load(self._scores, key, start)

        def hidden_becomes(value: float, key: ir.Value, vector: ir.Value) -> ir.Value:
            if is_seen is None:
                return vector
            return builder.select(is_seen(key), vector, each(value))

        def take_largest(key: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
            return [maximum(builder, carried[0], hidden_becomes(_LOWEST, key, score(key)))]

        (largest,) = loop(builder, _ZERO, self._num_keys, 1, [each(_LOWEST)], take_largest)
        grown = builder.fcmp_ordered(">", largest, builder.fadd(before, each(_SLACK)))
        reference = builder.select(grown, largest, before)
        is_empty = builder.fcmp_ordered("==", reference, each(_LOWEST))
        finite = builder.select(is_empty, each(0.0), reference)
        factor = exp2(builder, builder.fsub(before, finite), _DEGREE)
        factor = builder.select(grown, factor, each(1.0))

        def weigh(pair: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
            key = builder.mul(pair, ir.Constant(I64, 2))
            totals: list[ir.Value] = []
            both: list[ir.Value] = []
            for k, total in zip((key, builder.add(key, ir.Constant(I64, 1))), carried, strict=True):
                weight = exp2(builder, builder.fsub(score(k), finite), _DEGREE)
                weight = hidden_becomes(0.0, k, weight)
                totals.append(builder.fadd(total, weight))
                both.append(weight)
            pairs = narrow_to_pairs(builder, both[0], both[1])
            builder.store(pairs, self._at(self._weights, pair, start, _INTEGERS), align=4)
            return totals

        totals = [builder.fmul(total, factor), zeros()]
        totals = loop(builder, _ZERO, self._num_pairs, 1, totals, weigh)
        total = builder.fadd(*totals)
        for row, vector in enumerate((reference, total, factor)):
            at = self._at(self._state, ir.Constant(I64, row), start, VECTOR)
            builder.store(vector, at, align=4)
        bits = builder.bitcast(grown, ir.IntType(LANES))
        return builder.icmp_signed("!=", bits, ir.Constant(ir.IntType(LANES), 0))

    def _load(self, base: ir.Value, row: ir.Value, start: ir.Value) -> ir.Value:
        return self._builder.load(self._at(base, row, start, VECTOR), align=4)

    def _at(
        self, base: ir.Value, row: ir.Value | int, start: ir.Value, vector: ir.Type
    ) -> ir.Value:
        """Pointer to a vector of a row of `width` elements."""
        builder = self._builder
        row = ir.Constant(I64, row) if isinstance(row, int) else row
        place = builder.add(builder.mul(row, self._width), start)
        return builder.bitcast(builder.gep(base, [place]), vector.as_pointer())


def _typing(  # Numba passes arguments by position
    _: object,
    scores_at: types.Type,
    weights_at: types.Type,
    width: types.Type,
    first_key: types.Type,
    num_keys: types.Type,
    num_pairs: types.Type,
    all_seen: types.Type,
    seen_at: types.Type,
    state_at: types.Type,
) -> tuple[Any, Any]:
    signature: Any = cast("Any", types.boolean)(
        scores_at,
        weights_at,
        width,
        first_key,
        num_keys,
        num_pairs,
        all_seen,
        seen_at,
        state_at,
    )

    def lower(_: Any, builder: Any, __: Any, args: tuple[ir.Value, ...]) -> Any:
        return _Softening(builder, args).emit()

    return signature, lower


soften_scores = cast(
    "Callable[[int, int, int, int, int, int, bool, int, int], bool]", intrinsic(_typing)
)
"""(scores address, weights address, width, first key, num_keys, num_pairs, all seen, seen address,
state address) -> whether any query's reference has moved.

scores_JM are powers of two in float32, rows of `width` queries, a multiple of LANES; row j belongs
to key `first key + j`. weights become pairs of bfloat16, [num_pairs, width]: 2^(score - reference),
and 0 for keys that a query does not see. seen holds the first and the last key that each query
sees, two rows of int32; it is not looked at when all queries see all keys, an even number. state
holds three rows of float32: references, totals and what the sums so far are to be multiplied by.
"""
