"""Collectives through shared memory, against their plain twin over gloo, between real processes."""

import pytest

from rank_processes import run_ranks
from shared_group_jobs import Job, compare_with_gloo, hammer, leave_rank_0_alone


@pytest.mark.parametrize("size", [2, 3])
def test_equal_to_gloo(tmp_path_factory: pytest.TempPathFactory, size: int) -> None:
    run_ranks(compare_with_gloo, Job(str(tmp_path_factory.mktemp("group")), size), size)


def test_slots_are_not_overwritten_while_they_are_read(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    run_ranks(hammer, Job(str(tmp_path_factory.mktemp("group")), 2), 2)


def test_dead_rank_is_an_error_not_a_hang(tmp_path_factory: pytest.TempPathFactory) -> None:
    run_ranks(leave_rank_0_alone, Job(str(tmp_path_factory.mktemp("group")), 2), 2)
