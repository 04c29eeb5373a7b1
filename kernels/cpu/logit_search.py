"""Where a top_k or top_p cut falls in a row of logits, without sorting it.

The cut is almost always close to the largest logit. So a few tokens are picked out first: those
within c temperatures of the maximum, for the least c of a short list that makes them sum up to the
target. Among them a radix search finds the cut exactly: a histogram over the top 11 bits of
`order_key` (the integer that orders as the float does), the bucket in which the sum from above
reaches the target, then the next 11 bits of that bucket's tokens, then the last 10.
"""

import numpy as np

from pageray.kernels.cpu.jit import jit
from pageray.kernels.cpu.memory import Array
from pageray.kernels.cpu.numerics import (
    INFINITY,
    from_order_key,
    larger,
    nan_to_lowest,
    order_key,
    temperatures_below,
    to_int32,
    to_int64,
)

_NUM_BUCKETS = 1 << 11
_OFFSET = 1 << 31

Candidates = tuple[Array, Array]
"""Scratch: float32 logits and weights of the tokens picked out, each as long as the vocabulary."""


@jit
def largest_logit(logits: Array, vocab_size: int) -> float:
    """The largest of the first `vocab_size` logits; NaN counts as -inf."""
    key = order_key(-INFINITY)
    for token in range(vocab_size):
        key = larger(key, order_key(nan_to_lowest(logits[token])))
    return from_order_key(key)


@jit
def lowest_kept_logit(
    logits: Array,
    weights: Array,
    by_weight: bool,
    target: float,
    start: tuple[float, float],
    candidates: Candidates,
) -> float:
    """The largest logit b such that the tokens with logit >= b sum up to `target` or more.

    Each token counts with its weight, or as one. If all together stay below the target (it can
    exceed their sum by rounding) the lowest logit. NaN counts as -inf. `start`: largest logit and
    temperature, where the search begins.
    """
    count = _pick(logits, weights, by_weight, target, start, candidates)
    prefix = to_int64(0)
    above = 0.0
    for shift in (21, 10, 0):
        above, bucket = _descend(candidates, count, by_weight, target, above, prefix, shift)
        prefix = (prefix << (10 if shift == 0 else 11)) | bucket
    return from_order_key(to_int32(prefix - _OFFSET))


@jit
def _pick(
    logits: Array,
    weights: Array,
    by_weight: bool,
    target: float,
    start: tuple[float, float],
    candidates: Candidates,
) -> int:
    """Copy tokens that certainly include the cut and all above it; returns how many."""
    largest, temperature = start
    lowest = -INFINITY
    for distance in (2, 4, 8, 16):
        cut = temperatures_below(largest, temperature, distance)
        if _sum_from(logits, weights, by_weight, cut) >= target:
            lowest = cut
            break
    count = 0
    for token in range(len(weights)):
        logit = nan_to_lowest(logits[token])
        if logit >= lowest:
            candidates[0][count] = logit
            candidates[1][count] = weights[token]
            count += 1
    return count


@jit
def _sum_from(logits: Array, weights: Array, by_weight: bool, cut: float) -> float:
    total = 0.0
    if by_weight:
        for token in range(len(weights)):
            total += weights[token] if logits[token] >= cut else 0.0
    else:
        for token in range(len(weights)):
            total += 1.0 if logits[token] >= cut else 0.0
    return total


@jit
def _descend(
    candidates: Candidates,
    count: int,
    by_weight: bool,
    target: float,
    above: float,
    prefix: int,
    shift: int,
) -> tuple[float, int]:
    """One level: (sum of everything above the chosen bucket, the bucket's number).

    `above` is the sum over the tokens above the bucket chosen so far, whose bits are `prefix`.
    """
    logits, weights = candidates
    bits = 10 if shift == 0 else 11
    sums = np.zeros(_NUM_BUCKETS, dtype=np.float64)
    lowest = _NUM_BUCKETS
    for token in range(count):
        code = to_int64(order_key(logits[token])) + _OFFSET
        if code >> (shift + bits) == prefix:
            bucket = (code >> shift) & ((1 << bits) - 1)
            sums[bucket] += weights[token] if by_weight else 1.0
            lowest = min(lowest, bucket)
    bucket = (1 << bits) - 1
    while bucket > lowest and above + sums[bucket] < target:
        above += sums[bucket]
        bucket -= 1
    return above, bucket
