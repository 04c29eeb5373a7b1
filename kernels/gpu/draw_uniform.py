"""Counter-based random numbers: Philox4x32-10 (Salmon et al., SC 2011).

key = the seed's (low, high) halves; counter = (position low, position high, sequence index, 0);
u = ((word 0 << 21) | (word 1 >> 11)) * 2^-53.

Shapes: everything is [R], int64 in and float64 out.
"""

# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportArgumentType=false
# Reason: values inside a @triton.jit function have no Python types.

import torch
import triton
import triton.language as tl
from torch import Tensor

from pageray.kernels.gpu.checks import check_vector
from pageray.kernels.gpu.launch import Launch, run

_BLOCK_R = 128


@triton.jit
def _multiply(word, MULTIPLIER: tl.constexpr):
    """High and low 32 bits of the 64-bit product, both uint32."""
    product = word.to(tl.uint64) * MULTIPLIER
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def _low_half(x):
    return x.to(tl.uint32)


@triton.jit
def _high_half(x):
    # Shifted as unsigned: a negative seed must not smear its sign.
    return (x.to(tl.uint64, bitcast=True) >> 32).to(tl.uint32)


# Grid: (cdiv(R, BLOCK_R),).
@triton.jit
def draw_uniform_kernel(
    seed_ptr, sequence_index_ptr, position_ptr, uniform_ptr, num_rows, BLOCK_R: tl.constexpr
):
    r_R = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    mask_R = r_R < num_rows
    seed_R = tl.load(seed_ptr + r_R, mask=mask_R, other=0)
    position_R = tl.load(position_ptr + r_R, mask=mask_R, other=0)
    c0 = _low_half(position_R)
    c1 = _high_half(position_R)
    c2 = _low_half(tl.load(sequence_index_ptr + r_R, mask=mask_R, other=0))
    c3 = c2 ^ c2
    k0 = _low_half(seed_R)
    k1 = _high_half(seed_R)
    for _ in range(10):
        high_0, low_0 = _multiply(c0, 0xD2511F53)
        high_2, low_2 = _multiply(c2, 0xCD9E8D57)
        c0 = high_2 ^ c1 ^ k0
        c1 = low_2
        c2 = high_0 ^ c3 ^ k1
        c3 = low_0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    grid_53 = (c0.to(tl.int64) << 21) | (c1 >> 11).to(tl.int64)
    tl.store(uniform_ptr + r_R, grid_53.to(tl.float64) * (2.0**-53), mask=mask_R)


def draw_uniform_launch(
    seed_R: Tensor, sequence_index_R: Tensor, position_R: Tensor, uniform_R: Tensor
) -> Launch:
    """One draw per row into uniform_R."""
    num_rows = seed_R.shape[0]
    return Launch(
        kernel=draw_uniform_kernel,
        grid=(triton.cdiv(num_rows, _BLOCK_R),),
        args={
            "seed_ptr": seed_R,
            "sequence_index_ptr": sequence_index_R,
            "position_ptr": position_R,
            "uniform_ptr": uniform_R,
            "num_rows": num_rows,
        },
        constants={"BLOCK_R": _BLOCK_R},
    )


def draw_uniform(seed_R: Tensor, sequence_index_R: Tensor, position_R: Tensor) -> Tensor:
    """float64 [R] in [0, 1); `Ops.draw_uniform` has the contract."""
    named = {"seed_R": seed_R, "sequence_index_R": sequence_index_R, "position_R": position_R}
    for name, tensor in named.items():
        check_vector(name, tensor, seed_R.shape[0], torch.int64)
    uniform_R = torch.empty(seed_R.shape, dtype=torch.float64, device=seed_R.device)
    run(draw_uniform_launch(seed_R, sequence_index_R, position_R, uniform_R))
    return uniform_R
