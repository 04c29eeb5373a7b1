"""The single rank of a TP 1 engine, run by the engine's own thread: no process, no channel."""

from pathlib import Path

import torch

from pageray.cluster.config import EngineConfig
from pageray.cluster.step import StepPlan, StepResult
from pageray.workers.graphs.backend import graph_backend_factory
from pageray.workers.malloc import keep_freed_memory
from pageray.workers.ranks.device import pick_device
from pageray.workers.ranks.messages import RankReport
from pageray.workers.ranks.progress import ProgressBoard
from pageray.workers.ranks.rank import Rank
from pageray.workers.tensor_parallel import SingleRank


class InProcessExecutor:
    def __init__(self, config: EngineConfig, model_folder: Path) -> None:
        if config.cpu_threads_per_rank is not None:
            torch.set_num_threads(config.cpu_threads_per_rank)
        keep_freed_memory()
        self._progress = ProgressBoard.create(1)
        device = pick_device(config, 0)
        self._rank = Rank(
            config,
            model_folder,
            device,
            SingleRank(),
            self._progress,
            new_graphs=graph_backend_factory(config, device),
        )
        self._is_down = False
        self._step_timeout_s = config.step_timeout_s

    def load(self) -> list[RankReport]:
        return [self._rank.load()]

    def allocate(self, num_blocks: int) -> list[str | None]:
        self._rank.allocate(num_blocks)
        return [self._rank.pool_path]

    def execute(self, plan: StepPlan) -> StepResult:
        return self._rank.execute(plan)

    def num_layers_written(self, step_id: int) -> int:
        return self._progress.num_layers_written(step_id)

    def wait_until_written(self, step_id: int) -> None:
        self._progress.wait_until_written(step_id, self._step_timeout_s)

    def check_alive(self) -> None:
        pass

    def shutdown(self) -> None:
        if not self._is_down:
            self._is_down = True
            self._rank.close()
            self._progress.close()
