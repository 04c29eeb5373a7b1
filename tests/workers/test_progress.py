"""How far the ranks are, seen from outside."""

import threading

import pytest

from pageray.cluster.errors import EngineDeadError
from pageray.workers.ranks.progress import ProgressBoard


def test_the_slowest_rank_counts() -> None:
    board = ProgressBoard.create(2)
    board.step_written(0, 7)
    board.layers_written(1, 7, 3)
    assert board.num_layers_written(7) == 3
    assert board.num_layers_written(8) == 0
    board.step_written(1, 7)
    assert board.num_layers_written(7) >= 30
    assert board.num_layers_written(6) >= 30
    board.layers_written(0, 8, 5)
    assert board.num_layers_written(8) == 0
    board.close()


def test_others_see_the_same_memory() -> None:
    board = ProgressBoard.create(1)
    other = ProgressBoard.open(board.path, 1)
    other.step_written(0, 3)
    board.wait_until_written(3, timeout_s=0.0)
    other.close()
    board.close()


def test_waiting_ends_when_the_rank_is_done_and_not_before() -> None:
    board = ProgressBoard.create(1)
    threading.Timer(0.05, board.step_written, (0, 5)).start()
    board.wait_until_written(5, timeout_s=10.0)
    with pytest.raises(EngineDeadError, match="step 6"):
        board.wait_until_written(6, timeout_s=0.05)
    board.close()
    with pytest.raises(EngineDeadError, match="shut down"):
        board.wait_until_written(5, timeout_s=1.0)
