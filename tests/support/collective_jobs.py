"""What the rank processes of `test_tensor_parallel.py` do; apart, so that they can import it."""

import time
from dataclasses import dataclass

import pytest
import torch

from pageray.cluster.errors import EngineDeadError
from pageray.workers.tensor_parallel import TorchDistributedGroup, join_store
from rank_processes import TIMEOUT_S


@dataclass(frozen=True)
class Job:
    port: int
    size: int


def join(job: Job, rank: int) -> TorchDistributedGroup:
    store = join_store("127.0.0.1", job.port, TIMEOUT_S)
    return TorchDistributedGroup(
        store=store, rank=rank, size=job.size, device=torch.device("cpu"), timeout_s=TIMEOUT_S
    )


def use_all_collectives(job: Job, rank: int) -> None:
    group = join(job, rank)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.full((3, 4), float(rank + 1), dtype=dtype)
        group.all_reduce(x)
        assert x.equal(torch.full((3, 4), 6.0, dtype=dtype))
        # A view that is not contiguous, and a width that cuts the last rank's part.
        part = torch.full((2, 4), float(rank), dtype=dtype)[:, ::2]
        gathered = group.gather_columns(part, 5)
        if rank == 0:
            assert gathered is not None
            assert gathered.tolist() == [[0.0, 0.0, 1.0, 1.0, 2.0]] * 2
        else:
            assert gathered is None
    group.close()
    group.close()


def leave_rank_0_alone(job: Job, rank: int) -> None:
    group = join(job, rank)
    group.all_reduce(torch.ones(1))
    if rank == 0:
        started = time.monotonic()
        with pytest.raises(EngineDeadError, match="rank 0 of 2"):
            group.all_reduce(torch.ones(1))
        assert time.monotonic() - started < TIMEOUT_S / 2
    group.close()
