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
DEGREE = 4
"""Of the polynomial of 2^x; weights are rounded to 8 bits next."""
_INTEGERS = ir.VectorType(I32, LANES)
_BIT = ir.IntType(1)
_ZERO = ir.Constant(I64, 0)
LOWEST = float("-inf")


def next_reference(
    builder: Any, before: ir.Value, largest: ir.Value
) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value]:
    """(whether it moves, the new one, what scores are taken from, what sums are multiplied by), in
    every lane, from the reference before and the largest new score."""
    grown = builder.fcmp_ordered(">", largest, builder.fadd(before, each(_SLACK)))
    reference = builder.select(grown, largest, before)
    is_empty = builder.fcmp_ordered("==", reference, each(LOWEST))
    finite = builder.select(is_empty, each(0.0), reference)
    factor = exp2(builder, builder.fsub(before, finite), DEGREE)
    return grown, reference, finite, builder.select(grown, factor, each(1.0))


class _Softening:
    """Emits the code for the tile's keys and any number of columns."""

    def __init__(self, builder: Any, args: tuple[ir.Value, ...]) -> None:
        self._builder = builder
        scores_at, weights_at, self._width, self._first_key, self._num_keys = args[:5]
        self._num_pairs, self._num_free, seen_at, state_at = args[5:]
        self._scores = builder.inttoptr(scores_at, F32.as_pointer())
        self._weights = builder.inttoptr(weights_at, I32.as_pointer())
        self._seen = builder.inttoptr(seen_at, I32.as_pointer())
        self._state = builder.inttoptr(state_at, F32.as_pointer())

    def emit(self) -> ir.Value:
        """Returns whether a reference has moved, as i1."""
        builder = self._builder

        def columns(start: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
            return [builder.or_(carried[0], self._columns(start))]

        none = ir.Constant(_BIT, 0)
        return loop(builder, _ZERO, self._width, LANES, [none], columns)[0]

    def _sight(self, start: ir.Value) -> Callable[[ir.Value], ir.Value]:
        """Whether LANES queries from `start` on see a key."""
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

        return is_seen

    def _columns(self, start: ir.Value) -> ir.Value:
        """LANES queries from `start` on. The first keys are seen by all of them, and need no look."""
        builder = self._builder
        before, total = (self._load(self._state, ir.Constant(I64, row), start) for row in (0, 1))
        is_seen = self._sight(start)

        def score(key: ir.Value) -> ir.Value:
            return self._load(self._scores, key, start)

        def take_largest(key: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
            return [maximum(builder, carried[0], score(key))]

        def take_largest_seen(key: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
            seen = builder.select(is_seen(key), score(key), each(LOWEST))
            return [maximum(builder, carried[0], seen)]

        largest = [each(LOWEST)]
        largest = loop(builder, _ZERO, self._num_free, 1, largest, take_largest)
        (largest,) = loop(builder, self._num_free, self._num_keys, 1, largest, take_largest_seen)
        grown, reference, finite, factor = next_reference(builder, before, largest)

        def weigh(pair: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
            key = builder.mul(pair, ir.Constant(I64, 2))
            weights = [weight_of(k) for k in (key, builder.add(key, ir.Constant(I64, 1)))]
            return keep(pair, weights, carried)

        def weigh_seen(pair: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
            key = builder.mul(pair, ir.Constant(I64, 2))
            weights = [
                builder.select(is_seen(k), weight_of(k), each(0.0))
                for k in (key, builder.add(key, ir.Constant(I64, 1)))
            ]
            return keep(pair, weights, carried)

        def weight_of(key: ir.Value) -> ir.Value:
            return exp2(builder, builder.fsub(score(key), finite), DEGREE)

        def keep(pair: ir.Value, weights: list[ir.Value], totals: list[ir.Value]) -> list[ir.Value]:
            pairs = narrow_to_pairs(builder, *weights)
            builder.store(pairs, self._at(self._weights, pair, start, _INTEGERS), align=4)
            return [
                builder.fadd(total, weight) for total, weight in zip(totals, weights, strict=True)
            ]

        totals = [builder.fmul(total, factor), zeros()]
        free_pairs = builder.sdiv(self._num_free, ir.Constant(I64, 2))
        totals = loop(builder, _ZERO, free_pairs, 1, totals, weigh)
        totals = loop(builder, free_pairs, self._num_pairs, 1, totals, weigh_seen)
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
    num_free: types.Type,
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
        num_free,
        seen_at,
        state_at,
    )

    def lower(_: Any, builder: Any, __: Any, args: tuple[ir.Value, ...]) -> Any:
        return _Softening(builder, args).emit()

    return signature, lower


soften_scores = cast(
    "Callable[[int, int, int, int, int, int, int, int, int], bool]", intrinsic(_typing)
)
"""(scores address, weights address, width, first key, num_keys, num_pairs, num_free, seen address,
state address) -> whether any query's reference has moved.

scores_JM are powers of two in float32, rows of `width` queries, a multiple of LANES; row j belongs
to key `first key + j`. weights become pairs of bfloat16, [num_pairs, width]: 2^(score - reference),
and 0 for keys that a query does not see. seen holds the first and the last key that each query
sees, two rows of int32; it is not looked at for the first num_free keys, an even number. state
holds three rows of float32: references, totals and what the sums so far are to be multiplied by.
"""
