"""Results of keys that were split over several items, and how they become one.

Two results (sum, largest, total) over disjoint keys merge by the formula of the online softmax:
with m = max of the two largest, each sum and total is scaled by exp(largest - m) and added.
A sink is a result too: one key whose score is the head's sink and whose value is zero.
"""

import numpy as np

from pageray.kernels.cpu.attention_tile import Scratch, floats
from pageray.kernels.cpu.jit import jit
from pageray.kernels.cpu.memory import Array, Pointer, flat
from pageray.kernels.cpu.numerics import INFINITY, ONE, ZERO, exp_of_negative, narrow

Partials = tuple[Array, Array, Array]
"""sum [rows, D], largest [rows], total [rows]; row = place * query heads + head."""

NO_SINKS = 0
"""Stands for the address of sinks_H where there are none."""

OutputShape = tuple[int, int, int]
"""Query heads H, head dim D, address of sinks_H float32 or NO_SINKS."""


@jit
def new_partials(num_places: int, num_heads: int, head_dim: int) -> Partials:
    """Room for the results of every query head at `num_places`, not filled."""
    rows = num_places * num_heads
    return (
        np.empty((rows, head_dim), np.float32),
        np.empty(rows, np.float32),
        np.empty(rows, np.float32),
    )


@jit
def addresses_of(partials: Partials) -> tuple[int, int, int]:
    """Of the three; the caller keeps the arrays alive."""
    sums, largests, totals = partials
    return sums.ctypes.data, largests.ctypes.data, totals.ctypes.data


@jit
def store_row(
    sums_at: int,
    largest: float,
    total: float,
    token: int,
    head: int,
    out_at: Pointer,
    shape: OutputShape,
) -> None:
    """out[token, head] = sum / total of a softmax state, the head's sink counted in."""
    num_heads, head_dim, sinks_at = shape
    if sinks_at != NO_SINKS:
        total = _with_sink(largest, total, floats(sinks_at, head)[0])
    factor = ONE / total
    out, sum_D = flat(out_at, (token * num_heads + head) * head_dim), floats(sums_at, 0)
    for d in range(head_dim):
        out[d] = narrow(sum_D[d] * factor, out)


@jit
def _with_sink(largest: float, total: float, sink: float) -> float:
    """total + exp(sink - largest): infinite when nothing but the sink counts."""
    above = sink - largest
    e = exp_of_negative(-above if above > ZERO else above)
    return total + (ONE / e if above > ZERO else e)


@jit
def keep_partial(
    scratch: Scratch,
    padded: int,
    row: int,
    partials: tuple[int, int, int],
    place_row: int,
    dim: int,
) -> None:
    """Copy a thread's softmax state of one query row to the addresses of `partials`."""
    source, target = floats(scratch[4], row * padded), floats(partials[0], place_row * dim)
    for d in range(dim):
        target[d] = source[d]
    floats(partials[1], place_row)[0] = floats(scratch[5], row)[0]
    floats(partials[2], place_row)[0] = floats(scratch[6], row)[0]


@jit
def merge_partials(
    merges: Array, first: int, end: int, partials: Partials, out_at: Pointer, shape: OutputShape
) -> None:
    """Fold each query's places into its first one, in their order, and store it.

    merges[first:end] holds whole queries.
    """
    num_heads = shape[0]
    sums, largests, totals = partials
    while first < end:
        token, target = merges[first, 0], merges[first, 1]
        last = first + 1
        while last < end and merges[last, 0] == token:
            for head in range(num_heads):
                _fold(partials, target * num_heads + head, merges[last, 1] * num_heads + head)
            last += 1
        for head in range(num_heads):
            row: int = target * num_heads + head
            at = sums.ctypes.data + 4 * row * shape[1]
            store_row(at, largests[row], totals[row], token, head, out_at, shape)
        first = last


@jit
def start_of_query(merges: Array, index: int) -> int:
    """The first merge at or after `index` that begins a query."""
    while 0 < index < len(merges) and merges[index, 0] == merges[index - 1, 0]:
        index += 1
    return index


@jit
def larger_of(a: float, b: float) -> float:
    """The larger; the first if they are equal."""
    return b if b > a else a


@jit
def _fold(partials: Partials, target: int, other: int) -> None:
    """Merge row `other` into row `target`."""
    sums, largests, totals = partials
    a, b = largests[target], largests[other]
    largest = larger_of(a, b)
    reference = largest if largest != -INFINITY else ZERO
    scale_a, scale_b = exp_of_negative(a - reference), exp_of_negative(b - reference)
    for d in range(sums.shape[1]):
        sums[target, d] = sums[target, d] * scale_a + sums[other, d] * scale_b
    totals[target] = totals[target] * scale_a + totals[other] * scale_b
    largests[target] = largest
