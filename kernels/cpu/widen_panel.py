"""int8 to bfloat16, in which every int8 is a number."""

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pageray.kernels.cpu.vectors import I64, LANES, load_vector, loop, store_vector


def _typing(_: object, w_at: types.Type, out_at: types.Type, count: types.Type) -> tuple[Any, Any]:
    def lower(context: Any, builder: Any, _: Any, args: tuple[ir.Value, ...]) -> Any:
        w_at, out_at, count = args
        w = builder.inttoptr(w_at, ir.IntType(8).as_pointer())
        out = builder.inttoptr(out_at, ir.IntType(16).as_pointer())

        def move(index: ir.Value, _: object) -> list[ir.Value]:
            vector = load_vector(builder, types.int8, builder.gep(w, [index]))
            store_vector(builder, types.uint16, vector, builder.gep(out, [index]))
            return []

        loop(builder, ir.Constant(I64, 0), count, LANES, [], move)
        return context.get_dummy_value()

    return cast("Any", types.void)(w_at, out_at, count), lower


widen_panel = cast("Callable[[int, int, int], None]", intrinsic(_typing))
"""(address of int8, address of bfloat16, count): the same numbers, in order; the count is a multiple
of LANES."""
