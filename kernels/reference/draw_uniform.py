"""Counter-based random numbers: Philox4x32-10 (Salmon et al., SC 2011).

A draw is a function of its counter and key alone, so a request that is preempted, moved or
started again elsewhere draws what it would have drawn.
"""

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10
_MASK = 0xFFFFFFFF

Words = tuple[Tensor, Tensor, Tensor, Tensor]
"""Four 32-bit words, each in an int64 tensor [R]."""


def draw_uniform(seed_R: Tensor, sequence_index_R: Tensor, position_R: Tensor) -> Tensor:
    """float64 [R] in [0, 1): the top 53 bits of (word 0, word 1) of Philox, word 0 first."""
    counter = (
        position_R & _MASK,
        (position_R >> 32) & _MASK,
        sequence_index_R & _MASK,
        torch.zeros_like(position_R),
    )
    word_0, word_1, _, _ = philox4x32(counter, (seed_R & _MASK, (seed_R >> 32) & _MASK))
    # 32 bits of word 0 and 21 of word 1: each sum below 2^53 is exact in float64.
    return ((word_0 << 21) | (word_1 >> 11)).double() * 2.0**-53


def philox4x32(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Ten rounds over four counter words and two key words, all int64 in 0 .. 2^32 - 1."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        high_0, low_0 = _multiply(c0, _MULTIPLIERS[0])
        high_2, low_2 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high_2 ^ c1 ^ k0, low_2, high_0 ^ c3 ^ k1, low_0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def _multiply(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of the product. int64 wraps, which leaves all 64 bits right."""
    product = word * multiplier
    return (product >> 32) & _MASK, product & _MASK
