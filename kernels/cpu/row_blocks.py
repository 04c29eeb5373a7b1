"""Blocks of rows that go through several operations in one thread.

With thousands of rows every operation leaves megabytes behind, which the next one fetches from
memory again. A block of rows stays in the second-level cache from one to the next. The price is that
weights pass once for each block, so blocks must not be small.
"""

from pageray.kernels.cpu.matrix_tile import HAS_MATRIX_REGISTERS, MAX_MATRIX_ROWS

_CACHE_BYTES = 5 << (18 if HAS_MATRIX_REGISTERS else 16)
"""Of a second-level cache, for what a block's operations leave: more than half of the 2 MiB that go
with matrix registers, and of 512 KiB elsewhere."""
_MIN_ROWS, _MAX_ROWS = 128, 256
_BLOCKS_PER_THREAD = 2
"""At least, so that one thread that is held up does not hold up the step by much."""

WHOLE = 0
"""Stands for the rows of a block where there are none: every operation takes all rows."""


def rows_of_block(num_rows: int, bytes_per_row: int, num_threads: int) -> int:
    """Rows of a block when the operations keep so many bytes of each, or WHOLE."""
    rows = min(_MAX_ROWS, _CACHE_BYTES // bytes_per_row) // MAX_MATRIX_ROWS * MAX_MATRIX_ROWS
    if rows < _MIN_ROWS or num_rows < _BLOCKS_PER_THREAD * num_threads * rows:
        return WHOLE
    return rows
