"""Starting rank processes: the seam between the engine and whatever runs them."""

import multiprocessing
from multiprocessing.process import BaseProcess
from typing import Protocol

from pageray.workers.ranks.messages import RankSpec, decode_rank_spec, encode


class RankProcess(Protocol):
    """A started rank."""

    @property
    def pid(self) -> int:
        """On this host."""
        ...

    def join(self, timeout_s: float) -> None:
        """Wait until it has done what `Shutdown` asks of it, at most so long."""
        ...

    def stop(self) -> None:
        """End it now, however it feels about that."""
        ...


class RankLauncher(Protocol):
    def launch(self, specs: list[RankSpec]) -> list[RankProcess]:
        """Start one process per spec, on this host, each running `rank_process.run_rank`.

        Raises `EngineDeadError` or `ConfigError` when they cannot be started.
        """
        ...


class ChildProcessLauncher:
    """Ranks as child processes, for offline use without Ray."""

    def launch(self, specs: list[RankSpec]) -> list[RankProcess]:
        context = multiprocessing.get_context("spawn")
        processes = [
            context.Process(
                target=_child_main,
                args=(encode(spec),),
                name=f"pageray-rank-{spec.rank}",
                daemon=True,
            )
            for spec in specs
        ]
        for process in processes:
            process.start()
        return [_ChildProcess(process) for process in processes]


class _ChildProcess:
    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        assert process.pid is not None, "the process has been started"
        self.pid = process.pid

    def join(self, timeout_s: float) -> None:
        self._process.join(timeout_s)

    def stop(self) -> None:
        self._process.kill()
        self._process.join()


def _child_main(spec: bytes) -> None:
    from pageray.workers.ranks.rank_process import run_rank

    run_rank(decode_rank_spec(spec))
