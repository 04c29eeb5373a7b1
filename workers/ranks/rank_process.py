"""The life of a rank that has a process of its own: commands in, reports out.

`run_rank` is what every launcher starts, whether as a Ray actor or as a plain child process.
"""

import logging
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from pageray.cluster.errors import PageRayError
from pageray.workers.channel.mailbox import Mailbox, PeerDeadError
from pageray.workers.channel.pulse import ProcessPulse
from pageray.workers.graphs.backend import graph_backend_factory
from pageray.workers.malloc import keep_freed_memory
from pageray.workers.ranks.device import pick_device
from pageray.workers.ranks.messages import (
    AllocatePool,
    PoolReady,
    RankFailure,
    RankSpec,
    Report,
    RunStep,
    Shutdown,
    StepDone,
    decode_command,
    encode,
)
from pageray.workers.ranks.progress import ProgressBoard
from pageray.workers.ranks.rank import Rank
from pageray.workers.tensor_parallel import SingleRank, TensorParallelGroup, TorchDistributedGroup

logger = logging.getLogger(__name__)


def run_rank(spec: RankSpec) -> None:
    """Serve the engine until it says `Shutdown` or is gone. Failures are reported, then end it."""
    torch.set_num_threads(spec.num_threads)
    keep_freed_memory()
    engine = ProcessPulse(spec.engine_pid, "the engine")
    commands = Mailbox.open(spec.commands_path, spec.size)
    reports = Mailbox.open(spec.reports_path, 1)
    try:
        _serve(spec, commands, reports, engine)
    except PeerDeadError as error:
        logger.warning("rank %d stops: %s", spec.rank, error)
    except Exception as error:  # the process boundary: whatever it is, the engine must hear of it
        logger.exception("rank %d failed", spec.rank)
        reports.write(encode(_failure(error)), engine)
    finally:
        commands.close()
        reports.close()
        engine.close()


def _serve(spec: RankSpec, commands: Mailbox, reports: Mailbox, engine: ProcessPulse) -> None:
    device = pick_device(spec.config, spec.device_index)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    tp = _join_group(spec, device)
    progress = ProgressBoard.open(spec.progress_path, spec.size)
    new_graphs = graph_backend_factory(spec.config, device)
    rank = Rank(spec.config, Path(spec.model_folder), device, tp, progress, new_graphs=new_graphs)

    def report(message: Report) -> None:
        reports.write(encode(message), engine)

    try:
        report(rank.load())
        while True:
            match decode_command(commands.read(spec.rank, engine)):
                case AllocatePool(num_blocks):
                    rank.allocate(num_blocks)
                    report(PoolReady(rank.pool_path))
                case RunStep(plan):
                    result = rank.execute(plan)
                    if spec.rank == 0:
                        report(StepDone(result))
                case Shutdown():
                    return
    finally:
        rank.close()
        progress.close()


def _join_group(spec: RankSpec, device: torch.device) -> TensorParallelGroup:
    if spec.size == 1:
        return SingleRank()
    timeout_s = spec.config.step_timeout_s
    store = FileStore(spec.rendezvous_path, spec.size)
    store.set_timeout(timedelta(seconds=timeout_s))
    if device.type == "cpu" and spec.config.cpu_collectives == "shared_memory":
        # Imported here: a CUDA rank has no use for Numba.
        from pageray.workers.shared_memory_group import SharedMemoryGroup

        return SharedMemoryGroup(store=store, rank=spec.rank, size=spec.size, timeout_s=timeout_s)
    return TorchDistributedGroup(
        store=store, rank=spec.rank, size=spec.size, device=device, timeout_s=timeout_s
    )


def _failure(error: Exception) -> RankFailure:
    kind = type(error).__name__ if isinstance(error, PageRayError) else ""
    text = str(error) if kind else f"{type(error).__name__}: {error}"
    return RankFailure(kind, text)
