"""What an engine asks of its ranks, however they are run."""

from typing import Protocol

from pageray.cluster.step import StepPlan, StepResult
from pageray.workers.ranks.messages import RankReport


class Executor(Protocol):
    """The ranks of one engine. Called from one thread, in this order: `load`, `allocate`, then
    `execute` for every step; `shutdown` at any time."""

    def load(self) -> list[RankReport]:
        """Every rank reads its weights; their reports in order of rank.

        Raises `ModelLoadError`, `ConfigError` or `EngineDeadError`.
        """
        ...

    def allocate(self, num_blocks: int) -> list[str | None]:
        """Every rank takes its pool and gets ready to run.

        Returns where each rank's pages can be mapped on this host; None for device memory.
        """
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step on all ranks. Raises `EngineDeadError` if one is gone or too slow."""
        ...

    def num_layers_written(self, step_id: int) -> int:
        """Leading layers of a step whose KV is in the pages of every rank. Any thread."""
        ...

    def wait_until_written(self, step_id: int) -> None:
        """Return once every rank has written its pages of an acknowledged step. Any thread may
        call it. Raises `EngineDeadError` if that does not come about."""
        ...

    def check_alive(self) -> None:
        """Raise `EngineDeadError` if a rank is gone. Any thread may call it."""
        ...

    def shutdown(self) -> None:
        """Stop the ranks and free what they hold. Safe to call twice."""
        ...
