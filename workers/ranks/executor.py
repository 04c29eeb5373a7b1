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

    def allocate(self, num_blocks: int) -> None:
        """Every rank takes its pool and gets ready to run."""
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step on all ranks. Raises `EngineDeadError` if one is gone or too slow."""
        ...

    def check_alive(self) -> None:
        """Raise `EngineDeadError` if a rank is gone. Any thread may call it."""
        ...

    def shutdown(self) -> None:
        """Stop the ranks and free what they hold. Safe to call twice."""
        ...
