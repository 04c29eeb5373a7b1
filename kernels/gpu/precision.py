"""Which dtype a kernel computes in, and a rounding that is right under the interpreter too.

Kernels load, cast to float32, compute in float32 and round once on the store; matrix products
alone run in the tensors' own dtype, for the tensor cores. Triton's interpreter multiplies
bfloat16 wrongly and truncates float32 to bfloat16 instead of rounding, so
under it products run in float32 and the rounding is done here.
"""

# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# Reason: values inside a @triton.jit function have no Python types.

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

IS_INTERPRETED: tl.constexpr = tl.constexpr(bool(knobs.runtime.interpret))
"""Whether `@triton.jit` made interpreted functions; fixed when this module is imported."""

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KV_DTYPES = (*FLOAT_DTYPES, torch.float8_e4m3fn)
"""What a pool may hold."""

_TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


def common_dtype(q: Tensor, kv: Tensor) -> torch.dtype:
    """Products run in it: the smallest dtype that holds the values of both, and q's for a pool in
    8 bits, whose every value bfloat16 and float16 hold too."""
    if kv.dtype is torch.float8_e4m3fn:
        return q.dtype
    return torch.promote_types(q.dtype, kv.dtype)


def dot_dtype(q: Tensor, kv: Tensor) -> tl.dtype:
    """`common_dtype` for a kernel; float32 when interpreted."""
    return tl.float32 if IS_INTERPRETED else _TRITON_DTYPES[common_dtype(q, kv)]


@triton.jit
def round_to(x, DTYPE: tl.constexpr):
    """float32 x rounded to DTYPE, to nearest, ties to even."""
    if IS_INTERPRETED and DTYPE == tl.bfloat16:
        # bfloat16 is the upper half of float32: add just under half a unit, or half where odd.
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)
    return x.to(DTYPE)
