"""The arithmetic of one tile of keys: scores, online softmax, weighted sum of values.

Legend: M query rows of the item (query-major: row = query * group + head of the group), J keys of
the tile, D head dim, padded to whole panels where it is written `DP`. All scratch is float32.

With few rows (a decode) K and V are read from their pages as they lie; with many it pays to turn
the keys of a tile round and to widen its values once.
"""

from pageray.kernels.cpu.dot_rows import MAX_DOT_ROWS, dot_rows
from pageray.kernels.cpu.jit import jit
from pageray.kernels.cpu.memory import (
    ALIGNMENT,
    FLOAT_CELL,
    Array,
    Pointer,
    aligned,
    flat,
    past,
)
from pageray.kernels.cpu.numerics import (
    INFINITY,
    ZERO,
    exp_of_negative,
    from_order_key,
    larger,
    order_key,
    tanh,
    widen,
)
from pageray.kernels.cpu.pages import PageLayout
from pageray.kernels.cpu.tile_product import MAX_ROWS, PANEL, tile_product
from pageray.kernels.cpu.turn_keys import turn_keys

TILE_KEYS = 64
"""A multiple of PANEL."""
_FEW_ROWS = 2 * MAX_DOT_ROWS

Scratch = tuple[int, int, int, int, int, int, int]
"""Addresses of one thread's q_MD (scaled), k_DJ, v_JDP, weights_MJ, sum_MDP, largest_M, total_M. An
array would cost two atomic additions each time it is handed on."""


@jit
def padded_dim(head_dim: int) -> int:
    """DP for a head dim."""
    return (head_dim + PANEL - 1) // PANEL * PANEL


@jit
def scratch_bytes(max_rows: int, head_dim: int) -> int:
    """Size of the memory that `carve_scratch` takes."""
    return carve_scratch(0, max_rows, head_dim)[6] + 4 * max_rows + ALIGNMENT


@jit
def carve_scratch(start: int, max_rows: int, head_dim: int) -> Scratch:
    """Cut memory into the parts of a `Scratch`."""
    padded = padded_dim(head_dim)
    q = aligned(start)
    k = aligned(q + 4 * max_rows * head_dim)
    v = aligned(k + 4 * head_dim * TILE_KEYS)
    weights = aligned(v + 4 * TILE_KEYS * padded)
    total_sum = aligned(weights + 4 * max_rows * TILE_KEYS)
    largest = aligned(total_sum + 4 * max_rows * padded)
    return q, k, v, weights, total_sum, largest, aligned(largest + 4 * max_rows)


@jit
def floats(address: int, offset: int) -> Array:
    """float32 from `offset` elements past an address on."""
    return flat((address, FLOAT_CELL), offset)


@jit
def is_read_in_place(num_rows: int, head_dim: int) -> bool:
    """Whether an item of so many rows reads K and V as they lie in their pages."""
    return num_rows <= _FEW_ROWS and head_dim % PANEL == 0


@jit
def score_keys(
    kv_at: Pointer,
    layout: PageLayout,
    place: int,
    table: Array,
    start: int,
    stop: int,
    scratch: Scratch,
    num_rows: int,
) -> None:
    """weights = q k^T for tokens start .. stop - 1. `place` is the element where block 0 keeps
    this head's keys."""
    q, k, _, weights, _, _, _ = scratch
    block_stride, _, _, _, block_size, head_dim = layout
    in_place = is_read_in_place(num_rows, head_dim)
    token = start
    while token < stop:
        slot = token % block_size
        run = min(block_size - slot, stop - token)
        first = table[token // block_size] * block_stride + place + slot * head_dim
        if in_place:
            _dot_run(q, head_dim, kv_at, first, run, weights + 4 * (token - start), num_rows)
        else:
            turn_keys(kv_at, first, run, head_dim, k + 4 * (token - start), TILE_KEYS)
        token += run
    if not in_place:
        _score_turned(q, head_dim, k, weights, num_rows, stop - start)


@jit
def _dot_run(
    q: int, head_dim: int, kv_at: Pointer, first: int, num_keys: int, out: int, num_rows: int
) -> None:
    k_at = past(kv_at, first)
    row = 0
    while row < num_rows:
        rows = min(MAX_DOT_ROWS, num_rows - row)
        q_at, out_at = q + 4 * row * head_dim, out + 4 * row * TILE_KEYS
        dot_rows(rows, q_at, head_dim, k_at, num_keys, head_dim, out_at, TILE_KEYS)
        row += rows


@jit
def _score_turned(
    q: int, head_dim: int, k: int, weights: int, num_rows: int, num_keys: int
) -> None:
    weights_MJ = floats(weights, 0)
    for j in range(num_rows * TILE_KEYS):
        weights_MJ[j] = ZERO
    for column in range(0, num_keys, PANEL):
        k_at = (k + 4 * column, FLOAT_CELL)
        for row in range(0, num_rows, MAX_ROWS):
            rows = min(MAX_ROWS, num_rows - row)
            q_at, out_at = q + 4 * row * head_dim, weights + 4 * (row * TILE_KEYS + column)
            tile_product(rows, q_at, head_dim, k_at, TILE_KEYS, head_dim, out_at, TILE_KEYS)


@jit
def add_values(
    kv_at: Pointer,
    layout: PageLayout,
    place: int,
    table: Array,
    start: int,
    stop: int,
    scratch: Scratch,
    num_rows: int,
) -> None:
    """sum += weights v for tokens start .. stop - 1. `place` is the element where block 0 keeps
    this head's values."""
    _, _, v, weights, sums, _, _ = scratch
    block_stride, _, _, _, block_size, head_dim = layout
    padded = padded_dim(head_dim)
    in_place = is_read_in_place(num_rows, head_dim)
    token = start
    while token < stop:
        slot = token % block_size
        run = min(block_size - slot, stop - token)
        first = table[token // block_size] * block_stride + place + slot * head_dim
        if in_place:
            v_at = past(kv_at, first)
            at = weights + 4 * (token - start)
            _weigh(at, v_at, head_dim, run, sums, padded, num_rows)
        else:
            for j in range(run):
                source = flat(kv_at, first + j * head_dim)
                target = floats(v, (token - start + j) * padded)
                for d in range(head_dim):
                    target[d] = widen(source[d])
        token += run
    if not in_place:
        _weigh(weights, (v, FLOAT_CELL), padded, stop - start, sums, padded, num_rows)


@jit
def _weigh(
    weights: int,
    v_at: Pointer,
    v_stride: int,
    num_keys: int,
    sums: int,
    padded: int,
    num_rows: int,
) -> None:
    """sum += weights v over `num_keys` keys, whose weights begin at the address `weights`."""
    for panel in range(0, padded, PANEL):
        panel_at = past(v_at, panel)
        for row in range(0, num_rows, MAX_ROWS):
            rows = min(MAX_ROWS, num_rows - row)
            weights_at = weights + 4 * row * TILE_KEYS
            sum_at = sums + 4 * (row * padded + panel)
            tile_product(rows, weights_at, TILE_KEYS, panel_at, v_stride, num_keys, sum_at, padded)


@jit
def cap_scores(scratch: Scratch, num_rows: int, num_keys: int, softcap: float) -> None:
    """weights = softcap tanh(weights / softcap) for the first rows and keys."""
    for row in range(num_rows):
        weights_J = floats(scratch[3], row * TILE_KEYS)
        for key in range(num_keys):
            weights_J[key] = softcap * tanh(weights_J[key] / softcap)


@jit
def update_row(
    scratch: Scratch, padded: int, row: int, first: int, end: int, num_keys: int
) -> None:
    """Scores of a row become weights; its state so far is scaled to the new largest score.

    Keys outside first .. end - 1 are not seen and get weight 0.
    """
    _, _, _, weights, sums, largests, totals = scratch
    weights_J, sum_DP = floats(weights, row * TILE_KEYS), floats(sums, row * padded)
    largest_M, total_M = floats(largests, 0), floats(totals, 0)
    before = largest_M[row]
    largest = _softmax_row(weights_J, first, end, num_keys, before)
    total = ZERO
    for j in range(num_keys):
        total += weights_J[j]
    if largest != before:
        factor = exp_of_negative(before - largest)
        for d in range(padded):
            sum_DP[d] *= factor
        total_M[row] *= factor
        largest_M[row] = largest
    total_M[row] += total


@jit
def _softmax_row(weights_J: Array, first: int, end: int, num_keys: int, largest: float) -> float:
    """Turn scores first .. end - 1 into exp(score - new largest), the others into 0.

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
    for j in range(end, num_keys):
        weights_J[j] = ZERO
    return largest
