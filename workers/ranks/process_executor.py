"""Ranks in processes of their own, driven through shared-memory mailboxes.

A step is one message to all ranks and one back from rank 0; there is no actor call and no socket
in it. A rank that dies is noticed through its pidfd within one waiting interval.
"""

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import TypeVar

from pageray.cluster import errors
from pageray.cluster.config import EngineConfig
from pageray.cluster.errors import EngineDeadError, PageRayError
from pageray.cluster.step import StepPlan, StepResult
from pageray.workers.channel.mailbox import Mailbox, PeerDeadError
from pageray.workers.channel.pulse import ProcessPulse
from pageray.workers.ranks.launcher import RankLauncher, RankProcess
from pageray.workers.ranks.messages import (
    AllocatePool,
    Command,
    PoolReady,
    RankFailure,
    RankReport,
    RankSpec,
    RunStep,
    Shutdown,
    StepDone,
    decode_report,
    encode,
)
from pageray.workers.ranks.progress import ProgressBoard
from pageray.workers.ranks.step_clock import StepClock

LOAD_TIMEOUT_S = 1800.0
SHUTDOWN_TIMEOUT_S = 5.0

ReportT = TypeVar("ReportT", RankReport, PoolReady, StepDone)


class ProcessExecutor:
    """Starts `config.tensor_parallel_size` ranks through `launcher` and talks to them."""

    def __init__(self, config: EngineConfig, model_folder: Path, launcher: RankLauncher) -> None:
        self._config = config
        self._size = config.tensor_parallel_size
        self._commands = Mailbox.create(self._size)
        self._reports = [Mailbox.create(1) for _ in range(self._size)]
        self._progress = ProgressBoard.create(self._size)
        self._folder = tempfile.mkdtemp(prefix="pageray-")
        self._is_down = False
        self._clock = StepClock(config.step_timeout_s)
        self._processes: list[RankProcess] = launcher.launch(
            [self._spec(rank, model_folder) for rank in range(self._size)]
        )
        self._pulses = [
            ProcessPulse(process.pid, f"rank {rank} of {self._size}")
            for rank, process in enumerate(self._processes)
        ]

    def load(self) -> list[RankReport]:
        return [self._expect(rank, RankReport, LOAD_TIMEOUT_S) for rank in range(self._size)]

    def allocate(self, num_blocks: int) -> list[str | None]:
        self._command(AllocatePool(num_blocks), LOAD_TIMEOUT_S)
        return [
            self._expect(rank, PoolReady, LOAD_TIMEOUT_S).pool_path for rank in range(self._size)
        ]

    def execute(self, plan: StepPlan) -> StepResult:
        timeout_s = self._clock.timeout_s(plan.num_tokens)
        started_s = time.monotonic()
        self._command(RunStep(plan), timeout_s)
        result = self._expect(0, StepDone, timeout_s).result
        self._clock.observe(plan.num_tokens, time.monotonic() - started_s)
        return result

    def num_layers_written(self, step_id: int) -> int:
        return self._progress.num_layers_written(step_id)

    def wait_until_written(self, step_id: int) -> None:
        self._progress.wait_until_written(step_id, self._config.step_timeout_s)

    def check_alive(self) -> None:
        for rank, pulse in enumerate(self._pulses):
            if not pulse.is_alive:
                raise EngineDeadError(f"rank {rank} of {self._size} has ended.")

    def shutdown(self) -> None:
        if self._is_down:
            return
        self._is_down = True
        try:
            self._command(Shutdown(), SHUTDOWN_TIMEOUT_S)
            for process in self._processes:
                process.join(SHUTDOWN_TIMEOUT_S)
        except EngineDeadError:
            pass  # they are gone already, or too stuck to listen; either way they are stopped now
        for process in self._processes:
            process.stop()
        for pulse in self._pulses:
            pulse.close()
        for mailbox in (self._commands, *self._reports):
            mailbox.close()
        self._progress.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _spec(self, rank: int, model_folder: Path) -> RankSpec:
        cores = len(os.sched_getaffinity(0))
        return RankSpec(
            config=self._config,
            model_folder=str(model_folder),
            rank=rank,
            size=self._size,
            device_index=rank,
            num_threads=self._config.cpu_threads_per_rank or max(1, cores // self._size),
            rendezvous_path=f"{self._folder}/rendezvous",
            engine_pid=os.getpid(),
            commands_path=self._commands.path,
            reports_path=self._reports[rank].path,
            progress_path=self._progress.path,
        )

    def _command(self, command: Command, timeout_s: float) -> None:
        try:
            self._commands.write(encode(command), self._pulse(timeout_s))
        except PeerDeadError as error:
            raise EngineDeadError(self._explain(error)) from error

    def _expect(self, rank: int, kind: type[ReportT], timeout_s: float) -> ReportT:
        try:
            report = decode_report(self._reports[rank].read(0, self._pulse(timeout_s)))
        except PeerDeadError as error:
            raise EngineDeadError(self._explain(error)) from error
        if isinstance(report, RankFailure):
            raise _as_error(report, rank)
        if not isinstance(report, kind):
            raise EngineDeadError(f"rank {rank} answered {report}, expected {kind.__name__}.")
        return report

    def _pulse(self, timeout_s: float) -> "_AllAlive":
        return _AllAlive(self._pulses, self._reports, timeout_s)

    def _explain(self, error: PeerDeadError) -> str:
        """The death of a rank, with its own last words if it left any."""
        for rank, mailbox in enumerate(self._reports):
            if mailbox.has_message(0):
                report = decode_report(mailbox.read(0, lambda: None))
                if isinstance(report, RankFailure):
                    return f"rank {rank} failed: {report.message}"
        return str(error)


class _AllAlive:
    """While one rank is waited for: are all alive, has none failed, is there time left?"""

    def __init__(
        self, pulses: list[ProcessPulse], reports: list[Mailbox], timeout_s: float
    ) -> None:
        self._pulses = pulses
        self._reports = reports
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s

    def __call__(self) -> None:
        for pulse in self._pulses:
            pulse()
        if time.monotonic() > self._deadline:
            raise PeerDeadError(f"no answer from the ranks within {self._timeout_s:g} s.")


def _as_error(report: RankFailure, rank: int) -> PageRayError:
    """Our own errors keep their class across the process boundary; others mean a dead engine."""
    if report.kind == errors.ModelLoadError.__name__:
        return errors.ModelLoadError(report.message)
    if report.kind == errors.ConfigError.__name__:
        return errors.ConfigError(report.message)
    return EngineDeadError(f"rank {rank} failed: {report.message}")
