"""What the ranks of `test_shared_memory_group.py` do; apart, so that they can import it."""

import time
from dataclasses import dataclass

import pytest
import torch
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from pageray.cluster.errors import EngineDeadError
from pageray.workers.shared_memory_group import SLOT_BYTES, SharedMemoryGroup
from pageray.workers.tensor_parallel import TorchDistributedGroup


@dataclass(frozen=True)
class Job:
    folder: str
    size: int


def join(job: Job, rank: int) -> SharedMemoryGroup:
    torch.set_num_threads(1)
    store = FileStore(f"{job.folder}/shared", job.size)
    return SharedMemoryGroup(store=store, rank=rank, size=job.size, timeout_s=30.0)


def compare_with_gloo(job: Job, rank: int) -> None:
    group = join(job, rank)
    twin = TorchDistributedGroup(
        store=FileStore(f"{job.folder}/gloo", job.size),
        rank=rank,
        size=job.size,
        device=torch.device("cpu"),
        timeout_s=30.0,
    )
    generator = torch.Generator().manual_seed(rank)
    large = SLOT_BYTES // 4 + 7  # more than one slot
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for shape in ((1, 5), (3, 64), (1, large)):
            x = torch.randn(shape, generator=generator).to(dtype)
            expected = x.float()
            twin.all_reduce(expected)
            group.all_reduce(x)
            torch.testing.assert_close(x, expected.to(dtype))
            # Sums run in rank order everywhere, so all ranks hold the same bits.
            everyone = twin.gather_columns(x.float().view(1, -1), job.size * x.numel())
            if everyone is not None:
                assert torch.equal(everyone, x.float().view(1, -1).repeat(1, job.size))
    for shape, cut in (((2, 3), 0), ((4, 6), 1), ((1, large), 3)):
        x = torch.randn(shape, generator=generator)
        gathered = group.gather_columns(x, job.size * shape[1] - cut)
        expected_parts = twin.gather_columns(x, job.size * shape[1] - cut)
        if rank == 0:
            assert gathered is not None
            assert expected_parts is not None
            assert torch.equal(gathered, expected_parts)
        else:
            assert gathered is None
    group.close()
    group.close()
    twin.close()


def hammer(job: Job, rank: int) -> None:
    """Operations of changing size, back to back: a slot overwritten too soon shows as a sum that
    is wrong."""
    group = join(job, rank)
    for number in range(3000):
        x = torch.full((1 + number % 50,), float(rank + number))
        group.all_reduce(x)
        assert x.eq(job.size * number + job.size * (job.size - 1) / 2).all(), number
        if number % 7 == 0:
            gathered = group.gather_columns(torch.full((1, 3), float(number + rank)), 3 * job.size)
            if gathered is not None:
                assert gathered[0, ::3].tolist() == [number + peer for peer in range(job.size)]
    group.close()


def leave_rank_0_alone(job: Job, rank: int) -> None:
    group = join(job, rank)
    group.all_reduce(torch.ones(1))
    if rank == 0:
        started = time.monotonic()
        with pytest.raises(EngineDeadError, match="rank 1 of 2"):
            group.all_reduce(torch.ones(1))
        assert time.monotonic() - started < 20
    group.close()
