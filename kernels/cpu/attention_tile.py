"""The arithmetic of one tile of keys: scores, online softmax, weighted sum of values.

Legend: M query rows of the item (query-major: row = query * group + head of the group), J keys of
the tile, D head dim. All scratch is float32. Four rows share each load of K and of V, and four
values each load of the accumulator; the innermost loops run over contiguous D and vectorise.
"""

import numpy as np

from pageray.kernels.cpu.jit import jit
from pageray.kernels.cpu.memory import Array, Pointer, flat
from pageray.kernels.cpu.numerics import (
    INFINITY,
    ZERO,
    exp_of_negative,
    from_order_key,
    larger,
    order_key,
    widen,
)
from pageray.kernels.cpu.pages import PageLayout

TILE_KEYS = 64

Scratch = tuple[Array, Array, Array, Array, Array, Array, Array]
"""q_MD (scaled), k_JD, v_JD, weights_MJ, sum_MD, largest_M, total_M of one thread."""


@jit
def new_scratch(max_rows: int, head_dim: int) -> Scratch:
    return (
        np.empty((max_rows, head_dim), dtype=np.float32),
        np.empty((TILE_KEYS, head_dim), dtype=np.float32),
        np.empty((TILE_KEYS, head_dim), dtype=np.float32),
        np.empty((max_rows, TILE_KEYS), dtype=np.float32),
        np.empty((max_rows, head_dim), dtype=np.float32),
        np.empty(max_rows, dtype=np.float32),
        np.empty(max_rows, dtype=np.float32),
    )


@jit
def load_keys(
    kv_at: Pointer, layout: PageLayout, place: int, table: Array, start: int, stop: int, x_JD: Array
) -> int:
    """Fill rows of x_JD with tokens start .. stop - 1, page by page through the block table.

    `place` is the element where block 0 keeps this head's plane. Returns the number of rows,
    rounded up to a multiple of four: the rows added are zero, so that a weight of zero on them
    stays zero whatever the memory held before.
    """
    block_stride, _, _, _, block_size, head_dim = layout
    token = start
    while token < stop:
        slot = token % block_size
        run = min(block_size - slot, stop - token)
        first = table[token // block_size] * block_stride + place + slot * head_dim
        for j in range(run):
            row = x_JD[token - start + j]
            source_D = flat(kv_at, first + j * head_dim)
            for i in range(head_dim):
                row[i] = widen(source_D[i])
        token += run
    num_keys = stop - start
    num_padded = (num_keys + 3) // 4 * 4
    for j in range(num_keys, num_padded):
        for i in range(head_dim):
            x_JD[j, i] = ZERO
    return num_padded


@jit
def scores(q_MD: Array, k_JD: Array, weights_MJ: Array, num_rows: int, num_keys: int) -> None:
    """weights = q k^T for the first rows and keys."""
    head_dim = q_MD.shape[1]
    for row in range(0, num_rows - 3, 4):
        for key in range(num_keys):
            a, b, c, d = ZERO, ZERO, ZERO, ZERO
            for i in range(head_dim):
                k = k_JD[key, i]
                a += q_MD[row, i] * k
                b += q_MD[row + 1, i] * k
                c += q_MD[row + 2, i] * k
                d += q_MD[row + 3, i] * k
            weights_MJ[row, key] = a
            weights_MJ[row + 1, key] = b
            weights_MJ[row + 2, key] = c
            weights_MJ[row + 3, key] = d
    for row in range(num_rows // 4 * 4, num_rows):
        for key in range(num_keys):
            a = ZERO
            for i in range(head_dim):
                a += q_MD[row, i] * k_JD[key, i]
            weights_MJ[row, key] = a


@jit
def softmax_row(weights_J: Array, first: int, end: int, num_padded: int, largest: float) -> float:
    """Turn scores first .. end - 1 into exp(score - new largest), everything else into 0.

    Returns the new largest score. A row that sees no key of the tile keeps the old one.
    """
    key_of_largest = order_key(largest)
    for j in range(first, end):
        key_of_largest = larger(key_of_largest, order_key(weights_J[j]))
    largest = from_order_key(key_of_largest)
    # While all scores are -inf any finite reference gives weights of 0 in place of NaN.
    reference = largest if largest != -INFINITY else ZERO
    for j in range(first):
        weights_J[j] = ZERO
    for j in range(first, end):
        weights_J[j] = exp_of_negative(weights_J[j] - reference)
    for j in range(end, num_padded):
        weights_J[j] = ZERO
    return largest


@jit
def add_values(sum_MD: Array, weights_MJ: Array, v_JD: Array, num_rows: int, num_keys: int) -> None:
    """sum += weights v; num_keys is a multiple of four."""
    head_dim = sum_MD.shape[1]
    for row in range(0, num_rows - 3, 4):
        for key in range(0, num_keys, 4):
            a0, a1, a2, a3 = _four(weights_MJ, row, key)
            b0, b1, b2, b3 = _four(weights_MJ, row + 1, key)
            c0, c1, c2, c3 = _four(weights_MJ, row + 2, key)
            d0, d1, d2, d3 = _four(weights_MJ, row + 3, key)
            for i in range(head_dim):
                v0, v1, v2, v3 = v_JD[key, i], v_JD[key + 1, i], v_JD[key + 2, i], v_JD[key + 3, i]
                sum_MD[row, i] += a0 * v0 + a1 * v1 + a2 * v2 + a3 * v3
                sum_MD[row + 1, i] += b0 * v0 + b1 * v1 + b2 * v2 + b3 * v3
                sum_MD[row + 2, i] += c0 * v0 + c1 * v1 + c2 * v2 + c3 * v3
                sum_MD[row + 3, i] += d0 * v0 + d1 * v1 + d2 * v2 + d3 * v3
    for row in range(num_rows // 4 * 4, num_rows):
        for key in range(0, num_keys, 4):
            a0, a1, a2, a3 = _four(weights_MJ, row, key)
            for i in range(head_dim):
                sum_MD[row, i] += (
                    a0 * v_JD[key, i]
                    + a1 * v_JD[key + 1, i]
                    + a2 * v_JD[key + 2, i]
                    + a3 * v_JD[key + 3, i]
                )


@jit
def _four(x_MJ: Array, row: int, key: int) -> tuple[float, float, float, float]:
    return x_MJ[row, key], x_MJ[row, key + 1], x_MJ[row, key + 2], x_MJ[row, key + 3]
