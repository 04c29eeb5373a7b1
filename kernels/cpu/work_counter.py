"""A counter that several threads share: whoever is free takes the next piece of work."""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pageray.kernels.cpu.jit import jit
from pageray.kernels.cpu.memory import Array

_WORDS_OF_LINE = 8


def _fetch_add_one(_: object, counter: types.Type) -> tuple[Any, Any]:
    signature: Any = types.int64(counter)

    def lower(context: Any, builder: Any, signature: Any, args: tuple[ir.Value, ...]) -> Any:
        array_type = signature.args[0]
        array = context.make_array(array_type)(context, builder, value=args[0])
        first = cast(
            "ir.Value",
            cgutils.get_item_pointer(
                context, builder, array_type, array, [context.get_constant(types.intp, 0)]
            ),
        )
        return builder.atomic_rmw("add", first, context.get_constant(types.int64, 1), "monotonic")

    return signature, lower


fetch_add_one = cast("Callable[[Array], int]", intrinsic(_fetch_add_one))
"""Add 1 to element 0 of an int64 array, atomically; returns what it was before."""


@jit
def new_counters(count: int) -> Array:
    """Zeros, a row and a cache line for each. Not where they are used: in a function with `prange`
    Numba would clear them in a parallel loop, which takes longer than some of the work."""
    return np.zeros((count, _WORDS_OF_LINE), np.int64)
