"""Collectives between real processes over gloo, and what a rank sees when another dies."""

from pathlib import Path

import pytest
import torch
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from collective_jobs import Job, leave_rank_0_alone, use_all_collectives
from pageray.cluster.errors import ConfigError, EngineDeadError
from pageray.workers.tensor_parallel import (
    SingleRank,
    TorchDistributedGroup,
    join_store,
    serve_store,
)
from rank_processes import TIMEOUT_S, run_ranks

CPU = torch.device("cpu")


def test_all_reduce_and_gather_between_three_processes() -> None:
    store = serve_store("127.0.0.1", TIMEOUT_S)
    run_ranks(use_all_collectives, Job(store.port, 3), 3)


def test_a_dead_rank_is_an_error_not_a_hang() -> None:
    store = serve_store("127.0.0.1", TIMEOUT_S)
    run_ranks(leave_rank_0_alone, Job(store.port, 2), 2)


def test_two_groups_in_one_process(tmp_path: Path) -> None:
    """No global state: a second group, on a file instead of a port, does not disturb the first."""
    groups = [
        TorchDistributedGroup(
            store=FileStore(str(tmp_path / name), 1), rank=0, size=1, device=CPU, timeout_s=5.0
        )
        for name in ("first", "second")
    ]
    groups[1].close()
    x = torch.tensor([[1.0, 2.0]])
    groups[0].all_reduce(x)
    assert x.tolist() == [[1.0, 2.0]]
    gathered = groups[0].gather_columns(x, 1)
    assert gathered is not None
    assert gathered.tolist() == [[1.0]]
    groups[0].close()
    assert not torch.distributed.is_initialized()


def test_waiting_for_absent_ranks_ends() -> None:
    store = serve_store("127.0.0.1", 0.5)
    with pytest.raises(EngineDeadError, match=r"rank 0 of 2.*0\.5 s"):
        TorchDistributedGroup(store=store, rank=0, size=2, device=CPU, timeout_s=0.5)


def test_joining_where_nobody_serves() -> None:
    store = serve_store("127.0.0.1", 1.0)
    port = store.port
    del store
    with pytest.raises(EngineDeadError, match=f"127.0.0.1:{port}"):
        join_store("127.0.0.1", port, 0.5)


@pytest.mark.parametrize("rank", [-1, 2])
def test_rank_outside_the_group(rank: int) -> None:
    store = serve_store("127.0.0.1", 1.0)
    with pytest.raises(ConfigError, match="ranks 0 to 1"):
        TorchDistributedGroup(store=store, rank=rank, size=2, device=CPU)


def test_single_rank_is_the_identity() -> None:
    group = SingleRank()
    x = torch.tensor([[1.0, 2.0, 3.0]])
    group.all_reduce(x)
    gathered = group.gather_columns(x, 2)
    assert gathered is not None
    assert gathered.tolist() == [[1.0, 2.0]]
    assert x.tolist() == [[1.0, 2.0, 3.0]]
    group.close()
