"""float32 values as a pool stores them: divided by their scale, saturated in 8 bits, rounded once.

float8_e4m3fn (OCP 8-bit floating point, revision 1.0) has 3 bits of mantissa, subnormals in steps
of 2^-9 below 2^-6, no infinity, and 448 as its largest number.
"""

# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# Reason: values inside a @triton.jit function have no Python types.

import triton
import triton.language as tl

from pageray.kernels.gpu.precision import IS_INTERPRETED, round_to

_E4M3_MAX: tl.constexpr = tl.constexpr(448.0)


@triton.jit
def quantise(x, scale, DTYPE: tl.constexpr):
    """float32 x / scale in DTYPE, to nearest, ties to even; a scale of None is 1."""
    if scale is not None:
        x = tl.div_rn(x, scale)
    if DTYPE == tl.float8e4nv:
        x = tl.clamp(x, -_E4M3_MAX, _E4M3_MAX, propagate_nan=tl.PropagateNan.ALL)
        if IS_INTERPRETED:
            # The interpreter's cast drops the carry of a rounded mantissa, and NaN.
            return _e4m3_bits(x).to(tl.float8e4nv, bitcast=True)
    return round_to(x, DTYPE)


@triton.jit
def _e4m3_bits(x):
    """float32 x within +-448, or NaN, as uint8 [sign, 4 bits of exponent + 7, 3 of mantissa]."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Rounded to 3 bits of mantissa; the exponent's bias goes from 127 to 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # The float32 numbers from 2^23 on are 1 apart, so the sum's last bits count steps of 2^-9.
    steps = (tl.abs(x) * 512.0 + 8388608.0).to(tl.uint32, bitcast=True) & 0xFF
    code = tl.where(tl.abs(x) < 2.0**-6, steps, normal)
    code = tl.where(x == x, code, 0x7F)
    return (code | ((bits >> 31) << 7)).to(tl.uint8)
