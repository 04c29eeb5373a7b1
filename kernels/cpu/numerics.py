"""float32 arithmetic on 16-bit storage, and the few functions that LLVM does not vectorise.

NumPy knows no bfloat16 and Numba no float16, so their bits travel in integers (`memory.py`):
uint16 carries bfloat16, int16 carries float16. `widen` and `narrow` are compiled per storage
dtype, which makes every kernel generic without a branch in its loops.
"""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.base import BaseContext
from numba.core.typing.templates import Signature
from numba.extending import intrinsic

from pageray.kernels.cpu.jit import jit_exact
from pageray.kernels.cpu.memory import Array

# Numba and llvmlite ship no types: these names stand for them inside this file only.
_Type = Any
_Lowering = Callable[[BaseContext, Any, Signature, tuple[Any, ...]], Any]
_Intrinsic = tuple[Signature, _Lowering]

_F32, _F16 = ir.FloatType(), ir.HalfType()
_I32, _I16 = ir.IntType(32), ir.IntType(16)


def _signature(result: _Type, *args: _Type) -> Signature:
    return cast("Signature", result(*args))


def _widen(_: object, value: _Type) -> _Intrinsic:
    def lower(_: BaseContext, builder: Any, __: Signature, args: tuple[Any, ...]) -> Any:
        (bits,) = args
        if value == types.float32:
            return bits
        if value == types.uint16:
            return builder.bitcast(builder.shl(builder.zext(bits, _I32), _I32(16)), _F32)
        if value == types.int16:
            return builder.fpext(builder.bitcast(bits, _F16), _F32)
        raise TypeError(f"widen takes float32, uint16 (bfloat16) or int16 (float16), not {value}")

    return _signature(types.float32, value), lower


def _narrow(_: object, __: _Type, target: _Type) -> _Intrinsic:
    storage = target.dtype

    def lower(_: BaseContext, builder: Any, __: Signature, args: tuple[Any, ...]) -> Any:
        number = args[0]
        if storage == types.float32:
            return number
        if storage == types.uint16:
            return _to_bfloat16(builder, number)
        if storage == types.int16:
            return builder.bitcast(builder.fptrunc(number, _F16), _I16)
        raise TypeError(f"narrow takes arrays of float32, uint16 or int16, not {storage}")

    return _signature(storage, types.float32, target), lower


def _to_bfloat16(builder: Any, number: Any) -> Any:
    """Round to nearest, ties to even. A NaN keeps its top bits and is made quiet: rounding could
    carry it over into infinity."""
    bits = builder.bitcast(number, _I32)
    high = builder.lshr(bits, _I32(16))
    half = builder.add(builder.and_(high, _I32(1)), _I32(0x7FFF))
    rounded = builder.lshr(builder.add(bits, half), _I32(16))
    is_nan = builder.fcmp_unordered("uno", number, number)
    return builder.trunc(builder.select(is_nan, builder.or_(high, _I32(0x40)), rounded), _I16)


def _power_of_two(_: object, __: _Type) -> _Intrinsic:
    def lower(_: BaseContext, builder: Any, __: Signature, args: tuple[Any, ...]) -> Any:
        exponent = builder.add(builder.fptosi(args[0], _I32), _I32(127))
        return builder.bitcast(builder.shl(exponent, _I32(23)), _F32)

    return _signature(types.float32, types.float32), lower


def _order_key(_: object, __: _Type) -> _Intrinsic:
    def lower(_: BaseContext, builder: Any, __: Signature, args: tuple[Any, ...]) -> Any:
        return _flip_negative(builder, builder.bitcast(args[0], _I32))

    return _signature(types.int32, types.float32), lower


def _from_order_key(_: object, __: _Type) -> _Intrinsic:
    def lower(_: BaseContext, builder: Any, __: Signature, args: tuple[Any, ...]) -> Any:
        return builder.bitcast(_flip_negative(builder, args[0]), _F32)

    return _signature(types.float32, types.int32), lower


def _flip_negative(builder: Any, bits: Any) -> Any:
    """Invert the magnitude bits of negative numbers; its own inverse."""
    sign = builder.ashr(bits, _I32(31))
    return builder.xor(bits, builder.and_(sign, _I32(0x7FFFFFFF)))


def _larger(_: object, __: _Type, ___: _Type) -> _Intrinsic:
    def lower(_: BaseContext, builder: Any, __: Signature, args: tuple[Any, ...]) -> Any:
        return builder.select(builder.icmp_signed(">", args[0], args[1]), args[0], args[1])

    return _signature(types.int32, types.int32, types.int32), lower


widen = cast("Callable[[float], float]", intrinsic(_widen))
"""The float32 value of a stored number."""

narrow = cast("Callable[[float, Array], float]", intrinsic(_narrow))
"""(value, array) -> the number as the array stores it, rounded to nearest even."""

order_key = cast("Callable[[float], int]", intrinsic(_order_key))
"""float32 -> int32 that compares as the number does; NaN with a clear sign bit is largest.

A maximum over integers vectorises; over floats it does only if NaN is assumed away.
"""

from_order_key = cast("Callable[[int], float]", intrinsic(_from_order_key))
"""The inverse of `order_key`."""

larger = cast("Callable[[int, int], int]", intrinsic(_larger))
"""The larger of two int32, as int32 (Numba's own max widens to int64: half the lanes)."""


def _f32(value: float) -> float:
    """A constant that keeps kernel arithmetic in float32; to the type checker it is a float."""
    return cast("float", np.float32(value))


floor = cast("Callable[[float], float]", np.floor)
square_root = cast("Callable[[float], float]", np.sqrt)
float32 = cast("Callable[[float], float]", np.float32)
"""Converts inside a kernel: Numba computes int * float32 in float64."""
float64 = cast("Callable[[float], float]", np.float64)
to_int32 = cast("Callable[[int], int]", np.int32)
to_int64 = cast("Callable[[int], int]", np.int64)
_power = cast("Callable[[float], float]", intrinsic(_power_of_two))

ZERO = _f32(0.0)
ONE = _f32(1.0)
INFINITY = _f32(np.inf)
LOWEST_KEY = cast("int", np.int32(-(2**31)))
_LOG2_E = _f32(1.4426950408889634)
_LN_2 = _f32(0.6931471805599453)
_SMALLEST = _f32(-87.0)
_HALF = _f32(0.5)
_MIN_EXPONENT = _f32(-126.0)
_C2, _C3, _C4 = _f32(1 / 2), _f32(1 / 6), _f32(1 / 24)
_C5, _C6, _C7 = _f32(1 / 120), _f32(1 / 720), _f32(1 / 5040)


@jit_exact
def exp_of_negative(x: float) -> float:
    """exp(x) of a float32 x <= 0, to about 2 ulp; 0 below -87, NaN stays NaN.

    exp(x) = 2^n exp(r), n = round(x / ln 2), |r| <= ln 2 / 2: the Taylor series to r^7 is off by
    less than 6e-9.
    """
    n = floor(x * _LOG2_E + _HALF)
    r = x - n * _LN_2
    # A NaN must not reach the conversion to int; it stays in r.
    n = n if n > _MIN_EXPONENT else _MIN_EXPONENT
    series = _C4 + r * (_C5 + r * (_C6 + r * _C7))
    value = (ONE + r * (ONE + r * (_C2 + r * (_C3 + r * series)))) * _power(n)
    return ZERO if x < _SMALLEST else value


@jit_exact
def sigmoid(x: float) -> float:
    """1 / (1 + exp(-x)) of a float32, without overflow for either sign."""
    e = exp_of_negative(-x if x > ZERO else x)
    return (ONE if x > ZERO else e) / (ONE + e)


@jit_exact
def tanh(x: float) -> float:
    """(1 - exp(-2 |x|)) / (1 + exp(-2 |x|)) with the sign of x, off by about 1e-7 at most."""
    size = x if x > ZERO else -x
    e = exp_of_negative(-size - size)
    y = (ONE - e) / (ONE + e)
    return y if x > ZERO else -y


@jit_exact
def nan_to_lowest(x: float) -> float:
    """x, or -inf for a NaN."""
    return x if x >= -INFINITY else -INFINITY


@jit_exact
def temperatures_below(largest: float, temperature: float, count: int) -> float:
    """largest - count * temperature in float32, the infinities included."""
    return largest - float32(count) * temperature
