"""Words of memory that processes share: ordered loads and stores, and polite waiting.

A plain load in a spin loop may be hoisted out of it by the compiler, and on weakly ordered
processors plain stores may arrive in any order; these emit LLVM's atomics. Addresses point at
aligned 64-bit words.
"""

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

# Numba and llvmlite ship no types: `Any` stands for them inside this file only.
_WORD_BYTES = 8


def _word_pointer(builder: Any, address: ir.Value) -> Any:
    return builder.inttoptr(address, ir.IntType(64).as_pointer())


def _load_acquire(_: object, __: types.Type) -> tuple[Any, Any]:
    def lower(_: Any, builder: Any, __: Any, args: tuple[ir.Value, ...]) -> Any:
        return builder.load_atomic(_word_pointer(builder, args[0]), "acquire", _WORD_BYTES)

    return types.int64(types.intp), lower


def _store_release(_: object, __: types.Type, ___: types.Type) -> tuple[Any, Any]:
    def lower(context: Any, builder: Any, __: Any, args: tuple[ir.Value, ...]) -> Any:
        builder.store_atomic(args[1], _word_pointer(builder, args[0]), "release", _WORD_BYTES)
        return context.get_dummy_value()

    return types.void(types.intp, types.int64), lower


def _yield_core(_: object) -> tuple[Any, Any]:
    def lower(context: Any, builder: Any, __: Any, ___: tuple[ir.Value, ...]) -> Any:
        function = builder.module.globals.get("sched_yield")
        if function is None:
            kind = ir.FunctionType(ir.IntType(32), [])
            function = ir.Function(builder.module, kind, "sched_yield")
        builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), lower


load_acquire = cast("Callable[[int], int]", intrinsic(_load_acquire))
"""The word at an address; what its writer wrote before it is visible afterwards."""

store_release = cast("Callable[[int, int], None]", intrinsic(_store_release))
"""(address, value): everything written before is visible to whoever acquires the value."""

yield_core = cast("Callable[[], None]", intrinsic(_yield_core))
"""sched_yield(2): let another runnable thread have the core."""
