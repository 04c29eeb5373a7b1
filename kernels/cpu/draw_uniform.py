"""Counter-based random numbers: Philox4x32-10 (Salmon et al., SC 2011).

A draw is a function of its counter and key alone, so a request that is preempted, moved or
started again elsewhere draws what it would have drawn.
"""

import torch
from torch import Tensor

from pageray.kernels.cpu.jit import jit
from pageray.kernels.cpu.memory import Pointer, flat, pointer, require_dtype, require_shape

_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_KEY_STEP_0, _KEY_STEP_1 = 0x9E3779B9, 0xBB67AE85
_NUM_ROUNDS = 10
_MASK = 0xFFFFFFFF
_GRID = 2.0**-53


def draw_uniform(seed_R: Tensor, sequence_index_R: Tensor, position_R: Tensor) -> Tensor:
    """float64 [R] in [0, 1): the top 53 bits of (word 0, word 1) of Philox, word 0 first."""
    inputs = (seed_R, sequence_index_R, position_R)
    for name, values_R in zip(("seed", "sequence_index", "position"), inputs, strict=True):
        require_shape(name, values_R, seed_R.shape[0])
        require_dtype(name, values_R, torch.int64)
    u_R = torch.empty(seed_R.shape[0], dtype=torch.float64)
    pointers = (pointer(seed_R), pointer(sequence_index_R), pointer(position_R), pointer(u_R))
    _draw_rows(*pointers, u_R.shape[0])
    return u_R


@jit
def _draw_rows(
    seed_at: Pointer, index_at: Pointer, position_at: Pointer, u_at: Pointer, num_rows: int
) -> None:
    seed, index = flat(seed_at, 0), flat(index_at, 0)
    position, u = flat(position_at, 0), flat(u_at, 0)
    for row in range(num_rows):
        counter = (
            position[row] & _MASK,
            (position[row] >> 32) & _MASK,
            index[row] & _MASK,
            0,
        )
        word_0, word_1, _, _ = philox4x32(counter, (seed[row] & _MASK, (seed[row] >> 32) & _MASK))
        u[row] = ((word_0 << 21) | (word_1 >> 11)) * _GRID


@jit
def philox4x32(
    counter: tuple[int, int, int, int], key: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Ten rounds over four counter words and two key words, all int64 in 0 .. 2^32 - 1."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        # int64 wraps, which leaves all 64 bits of a product right.
        product_0, product_2 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (
            ((product_2 >> 32) & _MASK) ^ c1 ^ k0,
            product_2 & _MASK,
            ((product_0 >> 32) & _MASK) ^ c3 ^ k1,
            product_0 & _MASK,
        )
        k0, k1 = (k0 + _KEY_STEP_0) & _MASK, (k1 + _KEY_STEP_1) & _MASK
    return c0, c1, c2, c3
