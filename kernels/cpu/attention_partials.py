"""Results of keys that were split over several items, and how they become one.

Two results (sum, largest, total) over disjoint keys merge by the formula of the online softmax:
with m = max of the two largest, each sum and total is scaled by exp(largest - m) and added.
"""

import numpy as np

from pageray.kernels.cpu.attention_plan import (
    END_QUERY,
    FIRST_QUERY,
    NOT_SPLIT,
    PARTIAL,
    SEQUENCE,
    queries_per_tile,
)
from pageray.kernels.cpu.attention_tile import Scratch
from pageray.kernels.cpu.jit import jit
from pageray.kernels.cpu.memory import Array, Pointer, flat
from pageray.kernels.cpu.numerics import INFINITY, ONE, ZERO, exp_of_negative, narrow
from pageray.kernels.cpu.pages import PageLayout

Partials = tuple[Array, Array, Array]
"""sum [rows, M, D], largest [rows, M], total [rows, M]; row = partial * KV heads + KV head."""


@jit
def max_rows_of(group: int) -> int:
    """The most query rows an item has."""
    return queries_per_tile(group) * group


@jit
def new_partials(num_partials: int, group: int, layout: PageLayout) -> Partials:
    """Room for `num_partials` results of every KV head, not filled."""
    _, _, _, num_kv_heads, _, head_dim = layout
    rows, max_rows = num_partials * num_kv_heads, max_rows_of(group)
    return (
        np.empty((rows, max_rows, head_dim), dtype=np.float32),
        np.empty((rows, max_rows), dtype=np.float32),
        np.empty((rows, max_rows), dtype=np.float32),
    )


@jit
def store_rows(
    sum_MD: Array,
    total_M: Array,
    item: Array,
    head: int,
    group: int,
    layout: PageLayout,
    out_at: Pointer,
) -> None:
    """out = sum / total for the item's rows."""
    _, _, _, num_kv_heads, _, head_dim = layout
    for row in range((item[END_QUERY] - item[FIRST_QUERY]) * group):
        token, q_head = item[FIRST_QUERY] + row // group, head * group + row % group
        out = flat(out_at, (token * num_kv_heads * group + q_head) * head_dim)
        factor = ONE / total_M[row]
        for d in range(head_dim):
            out[d] = narrow(sum_MD[row, d] * factor, out)


@jit
def keep_partial(scratch: Scratch, num_rows: int, partials: Partials, place: int) -> None:
    """Copy a thread's softmax state, `num_rows` query rows of it, to row `place`."""
    _, _, _, _, sum_MD, largest_M, total_M = scratch
    sums, largests, totals = partials
    for row in range(num_rows):
        for d in range(sums.shape[2]):
            sums[place, row, d] = sum_MD[row, d]
        largests[place, row] = largest_M[row]
        totals[place, row] = total_M[row]


@jit
def merge_partials(
    items: Array, partials: Partials, group: int, layout: PageLayout, out_at: Pointer
) -> None:
    """Fold each split sequence's partials into its first one, in key order, and store it."""
    num_kv_heads = layout[3]
    first = 0
    while first < len(items):
        end = first + 1
        if items[first, PARTIAL] != NOT_SPLIT:
            while end < len(items) and items[end, SEQUENCE] == items[first, SEQUENCE]:
                end += 1
            num_rows = (items[first, END_QUERY] - items[first, FIRST_QUERY]) * group
            for head in range(num_kv_heads):
                target = items[first, PARTIAL] * num_kv_heads + head
                for other in range(first + 1, end):
                    _fold(partials, num_rows, target, items[other, PARTIAL] * num_kv_heads + head)
                store_rows(
                    partials[0][target],
                    partials[2][target],
                    items[first],
                    head,
                    group,
                    layout,
                    out_at,
                )
        first = end


@jit
def _fold(partials: Partials, num_rows: int, target: int, other: int) -> None:
    """Merge row `other` into row `target`."""
    sums, largests, totals = partials
    for row in range(num_rows):
        a, b = largests[target, row], largests[other, row]
        largest = a if a > b else b
        reference = largest if largest != -INFINITY else ZERO
        scale_a, scale_b = exp_of_negative(a - reference), exp_of_negative(b - reference)
        for d in range(sums.shape[2]):
            sums[target, row, d] = sums[target, row, d] * scale_a + sums[other, row, d] * scale_b
        totals[target, row] = totals[target, row] * scale_a + totals[other, row] * scale_b
        largests[target, row] = largest
