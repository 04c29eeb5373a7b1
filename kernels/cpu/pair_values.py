"""Values of two tokens side by side, as `matrix_product` takes them, and back to their order.

The pairs of 2 LANES dims fill two vectors. Inside every 128 bits the first half of the pairs goes to
one vector and the second half to the other, which is what one instruction each does; the order is
put right in the results.
"""

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pageray.kernels.cpu.matrix_tile import REGISTER_ROWS
from pageray.kernels.cpu.vectors import F32, I32, I64, LANES, VECTOR, loop

PAIR_PANEL = 2 * LANES
_I16 = ir.IntType(16)
_WORDS = ir.VectorType(_I16, 2 * LANES)
_BLOCK = 8
"""Words in 128 bits."""
_ZERO = ir.Constant(I64, 0)


def _vector_at(builder: Any, base: ir.Value, index: ir.Value, vector: ir.Type) -> ir.Value:
    return builder.bitcast(builder.gep(base, [index]), vector.as_pointer())


def _dims_of(half: int) -> list[int]:
    """Which dims of a panel a vector holds, in its order."""
    dims: list[int] = []
    for block in range(0, 2 * LANES, _BLOCK):
        start = block + half * _BLOCK // 2
        dims.extend(range(start, start + _BLOCK // 2))
    return dims


def _pair(  # Numba passes arguments by position
    _: object,
    runs_at: types.Type,
    num_runs: types.Type,
    head_dim: types.Type,
    out_at: types.Type,
    panel_stride: types.Type,
) -> tuple[Any, Any]:
    signature: Any = cast("Any", types.void)(runs_at, num_runs, head_dim, out_at, panel_stride)

    def lower(context: Any, builder: Any, _: Any, args: tuple[ir.Value, ...]) -> Any:
        runs_at, num_runs, head_dim, out_at, panel_stride = args
        runs = builder.inttoptr(runs_at, I64.as_pointer())
        out = builder.inttoptr(out_at, I32.as_pointer())
        pairs_of_run = ir.Constant(I64, REGISTER_ROWS // 2 * PAIR_PANEL)

        def run(index: ir.Value, _: object) -> list[ir.Value]:
            values = builder.inttoptr(builder.load(builder.gep(runs, [index])), _I16.as_pointer())
            target = builder.gep(out, [builder.mul(index, pairs_of_run)])

            def panel(number: ir.Value, _: object) -> list[ir.Value]:
                source = builder.gep(values, [builder.mul(number, ir.Constant(I64, PAIR_PANEL))])
                start = builder.gep(target, [builder.mul(number, panel_stride)])
                for pair in range(REGISTER_ROWS // 2):
                    for half, pairs in enumerate(_pairs_of_two(builder, source, head_dim, pair)):
                        place = ir.Constant(I64, pair * PAIR_PANEL + half * LANES)
                        at = _vector_at(builder, start, place, _WORDS)
                        builder.store(pairs, at, align=4)
                return []

            num_panels = builder.sdiv(head_dim, ir.Constant(I64, PAIR_PANEL))
            loop(builder, _ZERO, num_panels, 1, [], panel)
            return []

        loop(builder, _ZERO, num_runs, 1, [], run)
        return context.get_dummy_value()

    return signature, lower


def _pairs_of_two(
    builder: Any, source: ir.Value, head_dim: ir.Value, pair: int
) -> tuple[ir.Value, ir.Value]:
    """Tokens 2 pair and 2 pair + 1 of a run, a panel of dims."""
    first, second = (
        _words_at(
            builder, builder.gep(source, [builder.mul(head_dim, ir.Constant(I64, 2 * pair + i))])
        )
        for i in (0, 1)
    )
    return _interleaved(builder, first, second)


def _words_at(builder: Any, at: ir.Value) -> ir.Value:
    return builder.load(builder.bitcast(at, _WORDS.as_pointer()), align=2)


def _interleaved(builder: Any, first: ir.Value, second: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The words of both side by side, in two vectors."""
    low, high = (
        ir.Constant(
            ir.VectorType(I32, 2 * LANES),
            [word for dim in _dims_of(half) for word in (dim, 2 * LANES + dim)],
        )
        for half in (0, 1)
    )
    return (
        builder.shuffle_vector(first, second, low),
        builder.shuffle_vector(first, second, high),
    )


def widened_halves(builder: Any, at: ir.Value) -> list[ir.Value]:
    """A token's panel of bfloat16 as two vectors of float32, in the order of the pairs."""
    zero = ir.Constant(_WORDS, [0] * 2 * LANES)
    halves = _interleaved(builder, zero, _words_at(builder, at))
    return [builder.bitcast(half, VECTOR) for half in halves]


def _put_in_order(_: object, x_at: types.Type, num_dims: types.Type) -> tuple[Any, Any]:
    def lower(context: Any, builder: Any, _: Any, args: tuple[ir.Value, ...]) -> Any:
        x = builder.inttoptr(args[0], F32.as_pointer())

        def panel(start: ir.Value, _: object) -> list[ir.Value]:
            places = [
                _vector_at(builder, x, builder.add(start, ir.Constant(I64, offset)), VECTOR)
                for offset in (0, LANES)
            ]
            halves = [builder.load(place, align=4) for place in places]
            held = _dims_of(0) + _dims_of(1)
            for number, place in enumerate(places):
                dims = range(number * LANES, (number + 1) * LANES)
                lanes = ir.Constant(ir.VectorType(I32, LANES), [held.index(dim) for dim in dims])
                builder.store(builder.shuffle_vector(*halves, lanes), place, align=4)
            return []

        loop(builder, _ZERO, args[1], PAIR_PANEL, [], panel)
        return context.get_dummy_value()

    return cast("Any", types.void)(x_at, num_dims), lower


pair_values = cast("Callable[[int, int, int, int, int], None]", intrinsic(_pair))
"""(address of runs, num_runs, head_dim, out address, panel stride): the bfloat16 values of REGISTER_ROWS
tokens at each run's address become pairs, [tokens / 2, PAIR_PANEL] for each panel of dims; panels are
`panel stride` pairs apart and head_dim is a multiple of PAIR_PANEL."""

put_in_order = cast("Callable[[int, int], None]", intrinsic(_put_in_order))
"""(address, num_dims): float32 columns in the order of `pair_values` come to lie in their own."""
