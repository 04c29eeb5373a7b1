"""Functions of whole vectors that LLVM has no instructions for."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numpy.polynomial import Chebyshev, Polynomial

from pageray.kernels.cpu.vectors import (
    HOST_FEATURES,
    I32,
    LANES,
    VECTOR,
    declared,
    multiply_add,
)

_INTEGERS = ir.VectorType(I32, LANES)
_SMALLEST, _LARGEST = -126.0, 126.0
_LOG2_E = math.log2(math.e)
_ACCURATE = 6

_HAS_SCALE = LANES == 16 and bool(HOST_FEATURES.get("avx512dq"))
"""Whether there are instructions for the fraction of a number and for products with 2^n."""
_MASK = ir.IntType(16)
_AS_SET = 4
"""Round as the thread has set, which is to the nearest."""


def each(value: float) -> ir.Constant:
    """A vector with the number in every lane."""
    return ir.Constant(VECTOR, [value] * LANES)


def maximum(builder: Any, a: ir.Value, b: ir.Value) -> ir.Value:
    """The larger in every lane; b where either is NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def across(
    builder: Any, combine: Callable[[Any, ir.Value, ir.Value], ir.Value], vector: ir.Value
) -> ir.Value:
    """All lanes combined, in every lane."""
    distance = LANES // 2
    while distance > 0:
        lanes = ir.Constant(_INTEGERS, [lane ^ distance for lane in range(LANES)])
        vector = combine(builder, vector, builder.shuffle_vector(vector, vector, lanes))
        distance //= 2
    return vector


def exp2(builder: Any, x: ir.Value, degree: int) -> ir.Value:
    """2^x in every lane for x <= 126; 0 far below -126, NaN stays NaN.

    2^x = 2^n 2^r with n = floor(x); 2^r is interpolated at the Chebyshev nodes of [0, 1], which is
    off by 4e-6 at most with degree 4, and by less than float32 rounds with degree 6.
    """
    if not _HAS_SCALE:
        return _exp2_of_integers(builder, x, degree)
    everywhere, rounding = ir.Constant(_MASK, -1), ir.Constant(I32, _AS_SET)
    remainder = declared(
        builder,
        "llvm.x86.avx512.mask.reduce.ps.512",
        VECTOR,
        [VECTOR, I32, VECTOR, _MASK, I32],
    )
    floor_mode = ir.Constant(I32, 1)
    r = builder.call(remainder, [x, floor_mode, each(0.0), everywhere, rounding])
    scale = declared(
        builder,
        "llvm.x86.avx512.mask.scalef.ps.512",
        VECTOR,
        [VECTOR, VECTOR, VECTOR, _MASK, I32],
    )
    value = _power_of_fraction(builder, r, degree)
    return builder.call(scale, [value, x, each(0.0), everywhere, rounding])


def _exp2_of_integers(builder: Any, x: ir.Value, degree: int) -> ir.Value:
    """`exp2` with 2^n put together from its bits."""
    # Numbers below the normal ones would be a hundred times slower to compute with.
    is_tiny = builder.fcmp_ordered("<", x, each(_SMALLEST))
    x = builder.select(is_tiny, each(_SMALLEST), x)
    n = builder.call(declared(builder, f"llvm.floor.v{LANES}f32", VECTOR, [VECTOR]), [x])
    value = _power_of_fraction(builder, builder.fsub(x, n), degree)
    shift = ir.Constant(_INTEGERS, [23] * LANES)
    exponent = builder.shl(builder.fptosi(n, _INTEGERS), shift)
    power = builder.bitcast(builder.add(builder.bitcast(value, _INTEGERS), exponent), VECTOR)
    return builder.select(is_tiny, each(0.0), power)


def _power_of_fraction(builder: Any, r: ir.Value, degree: int) -> ir.Value:
    """2^r for r in [0, 1]."""
    terms = Chebyshev.interpolate(np.exp2, degree, domain=[0, 1]).convert(kind=Polynomial).coef
    value: ir.Value = each(float(terms[degree]))
    for term in reversed(terms[:degree]):
        value = multiply_add(builder, value, r, each(float(term)))
    return value


def silu(builder: Any, x: ir.Value) -> ir.Value:
    """x / (1 + exp(-x)) in every lane; below -87 it may be off by 1e-36."""
    power = builder.fmul(x, each(-_LOG2_E))
    too_large = builder.fcmp_ordered(">", power, each(_LARGEST))
    power = builder.select(too_large, each(_LARGEST), power)
    e = exp2(builder, power, _ACCURATE)
    return builder.fmul(x, reciprocal(builder, builder.fadd(each(1.0), e)))


def reciprocal(builder: Any, x: ir.Value) -> ir.Value:
    """1 / x in every lane, for normal numbers."""
    if not _HAS_SCALE:
        return builder.fdiv(each(1.0), x)
    guess_of = declared(builder, "llvm.x86.avx512.rcp14.ps.512", VECTOR, [VECTOR, VECTOR, _MASK])
    guess = builder.call(guess_of, [x, each(0.0), ir.Constant(_MASK, -1)])
    # Newton's step doubles the 14 bits of the guess; a division takes longer than all of this.
    error = multiply_add(builder, builder.fneg(x), guess, each(1.0))
    return multiply_add(builder, guess, error, guess)
