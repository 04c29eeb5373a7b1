"""Attention of an item's query rows on matrix registers, for pages of bfloat16.

scores_JW = K_JD Q_DW with a query in each column: keys go into the product as they lie in their
pages, and the softmax runs down columns, where no lane waits for another. Then the weights are
turned round: sums_WD += P_WJ V_JD. With a few rows, as in a decode, scores are turned round instead,
the softmax runs along keys, and values are weighed in vector registers.

Legend: query rows of the item in panels of W columns, J keys of a tile, D head dim. All scratch is
passed by address: an array costs two atomic additions each time it is handed on.
"""

import numpy as np

from pageray.kernels.cpu.attention_plan import POSITION, TOKEN, Query
from pageray.kernels.cpu.attention_tile import Scratch, floats
from pageray.kernels.cpu.jit import jit
from pageray.kernels.cpu.matrix_tile import (
    MATRIX_DEPTH,
    MAX_MATRIX_COLUMNS,
    REGISTER_COLUMNS,
    REGISTER_ROWS,
    matrix_product,
)
from pageray.kernels.cpu.memory import (
    ALIGNMENT,
    BFLOAT16_CELL,
    FLOAT_CELL,
    INDEX_CELL,
    PAIR_CELL,
    Array,
    Pointer,
    aligned,
    flat,
)
from pageray.kernels.cpu.numerics import INFINITY, ZERO, float32, narrow, widen
from pageray.kernels.cpu.pages import PageLayout
from pageray.kernels.cpu.pair_values import PAIR_PANEL, pair_values, put_in_order
from pageray.kernels.cpu.score_runs import score_runs
from pageray.kernels.cpu.soften_rows import MAX_FEW_ROWS, soften_rows
from pageray.kernels.cpu.soften_scores import soften_scores
from pageray.kernels.cpu.turn_keys import turn_square
from pageray.kernels.cpu.vectors import LANES
from pageray.kernels.cpu.weigh_values import weigh_values

_LOG2_E = float32(np.log2(np.e))
_LN_2 = float32(np.log(2.0))
_KEYS = 256
"""Of a tile, at most: what is stored by one kind of register and loaded by another waits to reach the
cache, and memory is read best in one go; the more keys, the less of both."""
_KEYS_OF_MANY_ROWS = 128
"""With many rows the scores of more keys would not stay in the first-level cache."""
_PAIRS = _KEYS // 2
_RUNS = _KEYS // REGISTER_ROWS
_RUNS_OF_STEP = MATRIX_DEPTH // REGISTER_ROWS
_NARROW, _WIDE = REGISTER_COLUMNS, MAX_MATRIX_COLUMNS

MatrixScratch = tuple[int, int, int, int, int, int, int, int, int, int, int]
"""Addresses of one thread's: queries in bfloat16 [W, D] and, a panel after the other, in pairs
[D / 2, W]; copies of keys and values [J, D]; addresses of every REGISTER_ROWS keys, and values;
values in pairs [D / PAIR_PANEL, J / 2, PAIR_PANEL]; scores [J, W], weights in pairs [J / 2, W] and
turned round [W, J / 2]; per panel what `soften_scores` calls seen [2, W] and state [3, W]."""


@jit
def fits_matrix_registers(head_dim: int, softcap: float) -> bool:
    """Whether such heads are computed here, on a machine that can."""
    return head_dim % MATRIX_DEPTH == 0 and not softcap > 0.0


@jit
def whole_panels(num_rows: int) -> int:
    """Rows of the panels that hold so many."""
    return (num_rows + _WIDE - 1) // _WIDE * _WIDE


@jit
def matrix_scratch_bytes(max_rows: int, head_dim: int) -> int:
    """Size of the memory that `carve_matrix_scratch` takes."""
    softmax = carve_matrix_scratch(0, max_rows, head_dim)[10]
    return softmax + 4 * 5 * whole_panels(max_rows) + ALIGNMENT


@jit
def carve_matrix_scratch(start: int, max_rows: int, head_dim: int) -> MatrixScratch:
    """Cut memory into the parts of a `MatrixScratch`."""
    columns = whole_panels(max_rows)
    queries = aligned(start)
    q = aligned(queries + 2 * columns * head_dim)
    keys = aligned(q + 2 * columns * head_dim)
    values = aligned(keys + 2 * _KEYS * head_dim)
    pairs = aligned(values + 2 * _KEYS * head_dim)
    key_runs = aligned(pairs + 2 * _KEYS * head_dim)
    value_runs = aligned(key_runs + 8 * _RUNS)
    scores = aligned(value_runs + 8 * _RUNS)
    weights = aligned(scores + 4 * _KEYS * _WIDE)
    turned = aligned(weights + 4 * _PAIRS * _WIDE)
    softmax = aligned(turned + 4 * _PAIRS * _WIDE)
    return (
        queries,
        q,
        keys,
        values,
        key_runs,
        value_runs,
        pairs,
        scores,
        weights,
        turned,
        softmax,
    )


@jit
def attend_in_matrix(
    q_at: Pointer,
    kv_at: Pointer,
    layout: PageLayout,
    query: Query,
    table: Array,
    keys: tuple[int, int],
    queries_at: int,
    num_queries: int,
    head: int,
    rows: Scratch,
    scratch: MatrixScratch,
) -> None:
    """Run the keys first .. end - 1 of `keys` through the softmax of the queries; sums, references
    and totals come into `rows`, where there is room for whole panels."""
    _, plane_stride, head_stride, _, _, head_dim = layout
    _, q, key_copy, value_copy, key_runs, value_runs, pairs, scores, weights, turned, softmax = (
        scratch
    )
    first_key, end_key = keys
    _, _, _, group, _, window, _ = query
    num_rows = num_queries * group
    width = _NARROW if num_rows <= _NARROW else _WIDE
    num_panels = (num_rows + width - 1) // width
    _pack_queries(q_at, query, head_dim, queries_at, num_queries, head, width, scratch)
    _clear(rows[4], num_rows * head_dim)
    _reset(queries_at, num_queries, group, window, end_key, num_panels, width, softmax)
    place = head * head_stride
    tile_keys = _KEYS if num_rows <= MAX_FEW_ROWS else _KEYS_OF_MANY_ROWS
    start = first_key
    while start < end_key:
        # Tiles start at multiples of their size, so rounding does not depend on the chunking.
        stop = min(end_key, (start // tile_keys + 1) * tile_keys)
        _find_runs(kv_at, layout, place, table, start, stop, key_copy, key_runs)
        _find_runs(kv_at, layout, place + plane_stride, table, start, stop, value_copy, value_runs)
        num_pair_runs = (stop - start + MATRIX_DEPTH - 1) // MATRIX_DEPTH * _RUNS_OF_STEP
        if num_rows > MAX_FEW_ROWS:
            pair_values(value_runs, num_pair_runs, head_dim, pairs, _PAIRS * PAIR_PANEL)
        for panel in range(num_panels):
            seen_at = softmax + 4 * panel * 5 * width
            state_at = seen_at + 4 * 2 * width
            num_keys, num_free = _keys_seen(seen_at, width, start, stop)
            if num_keys > 0:
                num_padded = (num_keys + MATRIX_DEPTH - 1) // MATRIX_DEPTH * MATRIX_DEPTH
                num_runs = (num_keys + REGISTER_ROWS - 1) // REGISTER_ROWS
                panel_at = q + 2 * panel * head_dim * width
                score_runs(key_runs, num_runs, head_dim, panel_at, width, scores)
                if num_rows <= MAX_FEW_ROWS:
                    has_moved = soften_rows(
                        scores,
                        width,
                        weights,
                        _KEYS,
                        num_rows,
                        start,
                        num_keys,
                        num_padded,
                        seen_at,
                        state_at,
                    )
                else:
                    has_moved = soften_scores(
                        scores,
                        weights,
                        width,
                        start,
                        num_keys,
                        num_padded // 2,
                        num_free,
                        seen_at,
                        state_at,
                    )
                    _turn_weights(weights, width, num_padded // 2, turned)
                sums_at = rows[4] + 4 * panel * width * head_dim
                if has_moved:
                    _rescale(sums_at, state_at + 4 * 2 * width, head_dim, min(width, num_rows))
                if num_rows <= MAX_FEW_ROWS:
                    num_pair_runs = num_padded // REGISTER_ROWS
                    weigh_values(
                        num_rows, value_runs, num_pair_runs, head_dim, weights, _KEYS, sums_at
                    )
                else:
                    _add_values(turned, pairs, head_dim, width, num_padded // 2, sums_at)
        start = stop
    _finish(num_rows, width, head_dim, rows, softmax)


@jit
def _clear(sums_at: int, count: int) -> None:
    sums = flat((sums_at, FLOAT_CELL), 0)
    for e in range(count):
        sums[e] = ZERO


@jit
def _pack_queries(
    q_at: Pointer,
    query: Query,
    head_dim: int,
    queries_at: int,
    num_queries: int,
    head: int,
    width: int,
    scratch: MatrixScratch,
) -> None:
    """Panels of pairs, scaled to powers of two: exp(s) = 2^(s log2 e)."""
    token_stride, head_stride, _, group, scale, _, _ = query
    factor, num_rows = float32(scale) * _LOG2_E, num_queries * group
    for index in range(num_queries):
        token = flat((queries_at, INDEX_CELL), 2 * index + TOKEN)[0]
        for member in range(group):
            source = flat(q_at, token * token_stride + (head * group + member) * head_stride)
            row = index * group + member
            target = flat((scratch[0], BFLOAT16_CELL), row * head_dim)
            for d in range(head_dim):
                target[d] = narrow(widen(source[d]) * factor, target)
    num_pairs = head_dim // 2
    # Pairs are moved as if each were a float32.
    source_at = (scratch[0], FLOAT_CELL)
    for row in range(0, num_rows, LANES):
        panel, column = row // width, row % width
        panel_at = scratch[1] + 4 * (panel * num_pairs * width + column)
        for pair in range(0, num_pairs, LANES):
            target_at = panel_at + 4 * pair * width
            turn_square(source_at, row * num_pairs + pair, num_pairs, target_at, width)


@jit
def _reset(
    queries_at: int,
    num_queries: int,
    group: int,
    window: int,
    end_key: int,
    num_panels: int,
    width: int,
    softmax: int,
) -> None:
    """What each column sees, and an empty softmax. Columns without a query do as the last one."""
    queries = flat((queries_at, INDEX_CELL), 0)
    for panel in range(num_panels):
        seen_at = softmax + 4 * panel * 5 * width
        seen, state = flat((seen_at, PAIR_CELL), 0), flat((seen_at, FLOAT_CELL), 2 * width)
        index, member = panel * width // group, panel * width % group
        for column in range(width):
            position = queries[2 * min(index, num_queries - 1) + POSITION]
            member += 1
            if member == group:
                index, member = index + 1, 0
            seen[column] = max(0, position - window + 1) if window > 0 else 0
            seen[width + column] = min(position, end_key - 1)
            state[column], state[width + column] = -INFINITY, ZERO


@jit
def _keys_seen(seen_at: int, width: int, start: int, stop: int) -> tuple[int, int]:
    """How many keys from `start` on, up to the last that a column of a panel sees, and how many of
    these every column sees, an even number. None if none sees any of start .. stop - 1."""
    first = flat((seen_at, PAIR_CELL), 0)
    last = flat((seen_at, PAIR_CELL), width)
    lowest_first, highest_first = first[0], first[0]
    lowest_last, highest_last = last[0], last[0]
    for column in range(1, width):
        lowest_first = min(lowest_first, first[column])
        highest_first = max(highest_first, first[column])
        lowest_last = min(lowest_last, last[column])
        highest_last = max(highest_last, last[column])
    end = min(stop, highest_last + 1)
    if end <= start or lowest_first >= stop:
        return 0, 0
    free = min(end, lowest_last + 1) - start if highest_first <= start else 0
    return end - start, max(0, free) // 2 * 2


@jit
def _find_runs(
    kv_at: Pointer,
    layout: PageLayout,
    place: int,
    table: Array,
    start: int,
    stop: int,
    copy_at: int,
    runs_at: int,
) -> None:
    """Addresses of every REGISTER_ROWS tokens of a head from `start` to `stop` - 1, up to a whole
    number of MATRIX_DEPTH. `place` is the element where block 0 keeps the first.

    Runs are read where they lie in their pages if no page ends inside them. Otherwise, and where
    the last MATRIX_DEPTH are not complete, they are copied, zeros after them.
    """
    block_stride, _, _, _, block_size, head_dim = layout
    runs = flat((runs_at, INDEX_CELL), 0)
    whole = 0
    if start % REGISTER_ROWS == 0 and block_size % REGISTER_ROWS == 0:
        whole = (stop - start) // MATRIX_DEPTH * MATRIX_DEPTH
    for j in range(0, whole, REGISTER_ROWS):
        token = start + j
        slot = token % block_size
        first = table[token // block_size] * block_stride + place + slot * head_dim
        runs[j // REGISTER_ROWS] = kv_at[0] + 2 * first
    token = start + whole
    while token < stop:
        slot = token % block_size
        run = min(block_size - slot, stop - token)
        source = flat(kv_at, table[token // block_size] * block_stride + place + slot * head_dim)
        target = flat((copy_at, BFLOAT16_CELL), (token - start) * head_dim)
        for e in range(run * head_dim):
            target[e] = source[e]
        token += run
    num_keys = stop - start
    end = (num_keys + MATRIX_DEPTH - 1) // MATRIX_DEPTH * MATRIX_DEPTH
    copy = flat((copy_at, BFLOAT16_CELL), 0)
    for e in range(num_keys * head_dim, end * head_dim):
        copy[e] = 0
    for j in range(whole, end, REGISTER_ROWS):
        runs[j // REGISTER_ROWS] = copy_at + 2 * j * head_dim


@jit
def _turn_weights(weights_at: int, width: int, num_pairs: int, turned_at: int) -> None:
    source_at = (weights_at, FLOAT_CELL)
    for pair in range(0, num_pairs, LANES):
        for column in range(0, width, LANES):
            target_at = turned_at + 4 * (column * _PAIRS + pair)
            turn_square(source_at, pair * width + column, width, target_at, _PAIRS)


@jit
def _add_values(
    turned_at: int,
    pairs_at: int,
    head_dim: int,
    width: int,
    num_pairs: int,
    sums_at: int,
) -> None:
    """sums += weights times values."""
    for d in range(0, head_dim, PAIR_PANEL):
        v_at, out_at = pairs_at + 4 * d * _PAIRS, sums_at + 4 * d
        matrix_product(
            width, PAIR_PANEL, turned_at, _PAIRS, v_at, num_pairs, out_at, head_dim, True
        )


@jit
def _rescale(sums_at: int, factor_at: int, head_dim: int, width: int) -> None:
    factors = flat((factor_at, FLOAT_CELL), 0)
    for row in range(width):
        sums_D = flat((sums_at, FLOAT_CELL), row * head_dim)
        factor = factors[row]
        for d in range(head_dim):
            sums_D[d] *= factor


@jit
def _finish(num_rows: int, width: int, head_dim: int, rows: Scratch, softmax: int) -> None:
    """Columns of sums in order, and references as exponents of e."""
    largests, totals = floats(rows[5], 0), floats(rows[6], 0)
    for row in range(num_rows):
        put_in_order(rows[4] + 4 * row * head_dim, head_dim)
        panel, column = row // width, row % width
        of_panel = flat((softmax + 4 * panel * 5 * width, FLOAT_CELL), 2 * width)
        largests[row] = of_panel[column] * _LN_2
        totals[row] = of_panel[width + column]
