"""How many rows go through a chain of operations together."""

from pageray.kernels.cpu.matrix_tile import MAX_MATRIX_ROWS
from pageray.kernels.cpu.row_blocks import WHOLE, rows_of_block


def test_blocks_are_whole_tiles_and_enough_for_every_thread() -> None:
    rows = rows_of_block(10_000, 1000, 2)
    assert rows > 0
    assert rows % MAX_MATRIX_ROWS == 0
    assert rows_of_block(4 * rows, 1000, 2) == rows
    assert rows_of_block(4 * rows - 1, 1000, 2) == WHOLE
    assert rows_of_block(4 * rows, 1000, 3) == WHOLE


def test_wide_rows_are_not_cut() -> None:
    """Weights would pass too often for the rows that fit the cache."""
    assert rows_of_block(1_000_000, 1 << 16, 1) == WHOLE
