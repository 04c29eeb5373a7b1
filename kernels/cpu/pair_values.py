"""Values of two tokens side by side, as `matrix_product` takes them, and back to their order.

Read as pairs, a token's values are (0, 1), (2, 3), ...; of two tokens the even ones make a pair each
and the odd ones another. So a panel of 32 columns holds 16 even dims and then the 16 odd ones, which
costs no exchange between lanes; the order is put right in the results.
"""

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pageray.kernels.cpu.vectors import F32, I32, I64, LANES, VECTOR, loop

PAIR_PANEL = 2 * LANES
_INTEGERS = ir.VectorType(I32, LANES)
_ZERO = ir.Constant(I64, 0)


def _vector_at(builder: Any, base: ir.Value, index: ir.Value, vector: ir.Type) -> ir.Value:
    return builder.bitcast(builder.gep(base, [index]), vector.as_pointer())


def _pair(  # Numba passes arguments by position
    _: object,
    first_at: types.Type,
    second_at: types.Type,
    num_dims: types.Type,
    out_at: types.Type,
    panel_stride: types.Type,
) -> tuple[Any, Any]:
    signature: Any = cast("Any", types.void)(first_at, second_at, num_dims, out_at, panel_stride)

    def lower(context: Any, builder: Any, _: Any, args: tuple[ir.Value, ...]) -> Any:
        first_at, second_at, num_dims, out_at, panel_stride = args
        first, second, out = (
            builder.inttoptr(at, I32.as_pointer()) for at in (first_at, second_at, out_at)
        )
        shift, low, high = (
            ir.Constant(_INTEGERS, [value] * LANES) for value in (16, 0xFFFF, 0xFFFF0000)
        )

        def panel(index: ir.Value, _: object) -> list[ir.Value]:
            start = builder.mul(index, ir.Constant(I64, LANES))
            a, b = (
                builder.load(_vector_at(builder, base, start, _INTEGERS), align=4)
                for base in (first, second)
            )
            even = builder.or_(builder.and_(a, low), builder.shl(b, shift))
            odd = builder.or_(builder.lshr(a, shift), builder.and_(b, high))
            target = builder.mul(index, panel_stride)
            builder.store(even, _vector_at(builder, out, target, _INTEGERS), align=4)
            target = builder.add(target, ir.Constant(I64, LANES))
            builder.store(odd, _vector_at(builder, out, target, _INTEGERS), align=4)
            return []

        num_panels = builder.sdiv(num_dims, ir.Constant(I64, PAIR_PANEL))
        loop(builder, _ZERO, num_panels, 1, [], panel)
        return context.get_dummy_value()

    return signature, lower


def _put_in_order(_: object, x_at: types.Type, num_dims: types.Type) -> tuple[Any, Any]:
    def lower(context: Any, builder: Any, _: Any, args: tuple[ir.Value, ...]) -> Any:
        x = builder.inttoptr(args[0], F32.as_pointer())

        def panel(start: ir.Value, _: object) -> list[ir.Value]:
            places = [
                _vector_at(builder, x, builder.add(start, ir.Constant(I64, offset)), VECTOR)
                for offset in (0, LANES)
            ]
            even, odd = (builder.load(place, align=4) for place in places)
            for half, place in enumerate(places):
                begin = half * LANES // 2
                lanes = [begin + i // 2 + (i % 2) * LANES for i in range(LANES)]
                mask = ir.Constant(ir.VectorType(I32, LANES), lanes)
                builder.store(builder.shuffle_vector(even, odd, mask), place, align=4)
            return []

        loop(builder, _ZERO, args[1], PAIR_PANEL, [], panel)
        return context.get_dummy_value()

    return cast("Any", types.void)(x_at, num_dims), lower


pair_values = cast("Callable[[int, int, int, int, int], None]", intrinsic(_pair))
"""(first address, second address, num_dims, out address, panel stride): the bfloat16 values of two
tokens become num_dims pairs, in panels of PAIR_PANEL that are `panel stride` pairs apart; num_dims is
a multiple of PAIR_PANEL."""

put_in_order = cast("Callable[[int, int], None]", intrinsic(_put_in_order))
"""(address, num_dims): float32 columns in the order of `pair_values` come to lie in their own."""
