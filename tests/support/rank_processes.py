"""Ranks of a tensor-parallel group as real processes, for tests."""

import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from paged_forward import CPU, load_shard, paged_logits
from pageray.workers.tensor_parallel import TorchDistributedGroup, join_store, serve_store

TIMEOUT_S = 60.0

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class _Job:
    folder: Path
    prompts: Sequence[Sequence[int]]
    tp_size: int
    port: int
    result: Path


def logits_of_ranks(
    folder: Path, prompts: Sequence[Sequence[int]], tp_size: int, scratch: Path
) -> list[Tensor]:
    """Rank 0's logits (see `paged_logits`) with `tp_size` processes over gloo."""
    store = serve_store("127.0.0.1", TIMEOUT_S)
    result = scratch / f"logits-tp{tp_size}.pt"
    job = _Job(folder=folder, prompts=prompts, tp_size=tp_size, port=store.port, result=result)
    run_ranks(_run_rank, job, tp_size)
    return torch.load(result, weights_only=True)


def run_ranks(target: Callable[[T, int], None], job: T, tp_size: int) -> None:
    """Call `target(job, rank)` in one new process per rank; every one must end well."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=target, args=(job, rank)) for rank in range(tp_size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(TIMEOUT_S)
        if process.is_alive():
            process.kill()
            process.join()
    exit_codes = [process.exitcode for process in processes]
    assert exit_codes == [0] * tp_size, f"exit codes of the ranks: {exit_codes}"


def _run_rank(job: _Job, rank: int) -> None:
    torch.set_num_threads(1)
    group = TorchDistributedGroup(
        store=join_store("127.0.0.1", job.port, TIMEOUT_S),
        rank=rank,
        size=job.tp_size,
        device=CPU,
        timeout_s=TIMEOUT_S,
    )
    model, shard = load_shard(job.folder, group)
    logits = paged_logits(model, shard, job.prompts)
    if rank == 0:
        torch.save(logits, job.result)
    group.close()
