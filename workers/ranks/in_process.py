"""The single rank of a TP 1 engine, run by the engine's own thread: no process, no channel."""

from pathlib import Path

import torch

from pageray.cluster.config import EngineConfig
from pageray.cluster.step import StepPlan, StepResult
from pageray.workers.ranks.messages import RankReport
from pageray.workers.ranks.rank import Rank, pick_device
from pageray.workers.tensor_parallel import SingleRank


class InProcessExecutor:
    def __init__(self, config: EngineConfig, model_folder: Path) -> None:
        if config.cpu_threads_per_rank is not None:
            torch.set_num_threads(config.cpu_threads_per_rank)
        self._rank = Rank(config, model_folder, pick_device(config, 0), SingleRank())

    def load(self) -> list[RankReport]:
        return [self._rank.load()]

    def allocate(self, num_blocks: int) -> None:
        self._rank.allocate(num_blocks)

    def execute(self, plan: StepPlan) -> StepResult:
        return self._rank.execute(plan)

    def check_alive(self) -> None:
        pass

    def shutdown(self) -> None:
        self._rank.close()
