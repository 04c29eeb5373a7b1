"""A real engine (scheduler, pool, page service) on fake ranks whose KV lies in real memory.

A token slot holds the digest of its whole prefix (`fake_ranks`), in a memfd that other engines
write pages into. Every step compares every slot it reads, so one foreign byte fails it.
"""

import mmap
import os
import time
from collections.abc import Callable

import numpy as np

from fake_ranks import EOS, VOCAB_SIZE, FakeRanks
from pageray.cluster.admission import EngineLimits
from pageray.cluster.block_events import BlockEventLog
from pageray.cluster.block_keys import BlockHasher, root_key
from pageray.cluster.block_pool import BlockPool
from pageray.cluster.page_layout import PoolLayout
from pageray.cluster.scheduler import Scheduler, SchedulerConfig
from pageray.cluster.step import StepPlan, StepResult
from pageray.workers.engine import Engine, ResolvedEngineConfig
from pageray.workers.engine_pages import EnginePages
from pageray.workers.ranks.messages import RankReport

BLOCK_SIZE = 4
SLOT_BYTES = 8


class FakeExecutor:
    """One rank of one layer and one KV head; K holds the digests."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int = BLOCK_SIZE,
        before_step: Callable[[], object] = time.time,
    ) -> None:
        self.layout = PoolLayout(
            num_layers=1,
            block_size=block_size,
            head_dim=1,
            element_bytes=SLOT_BYTES,
            shards=((0, 1),),
        )
        self._before_step = before_step
        self._memfd = os.memfd_create("fake-pool", os.MFD_CLOEXEC)
        os.ftruncate(self._memfd, (num_blocks + 1) * self.layout.page_bytes(0))
        memory = np.frombuffer(mmap.mmap(self._memfd, 0), np.int64)
        pages = memory.reshape(num_blocks + 1, 1, 2, 1, block_size)
        self.ranks = FakeRanks(num_blocks, block_size)
        # A view: what a transfer writes is what the next step reads.
        self.ranks.slots = pages[:, 0, 0, 0, :]  # type: ignore[assignment]

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._memfd}"

    def load(self) -> list[RankReport]:
        raise NotImplementedError

    def allocate(self, num_blocks: int) -> list[str | None]:
        return [self.path]

    def execute(self, plan: StepPlan) -> StepResult:
        self._before_step()
        return self.ranks.execute(plan)

    def num_layers_written(self, step_id: int) -> int:
        return 1

    def wait_until_written(self, step_id: int) -> None:
        """A step is written when it is acknowledged."""

    def check_alive(self) -> None:
        """Nothing here can die."""

    def shutdown(self) -> None:
        os.close(self._memfd)


def fake_engine(
    num_blocks: int, *, budget: int = 32, before_step: Callable[[], object] = time.time
) -> Engine:
    executor = FakeExecutor(num_blocks, before_step=before_step)
    limits = EngineLimits(
        vocab_size=VOCAB_SIZE,
        max_model_len=400,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=8,
        eos_token_ids=(EOS,),
    )
    root = root_key("fake", "int64", BLOCK_SIZE)
    pool = BlockPool(num_blocks, BlockEventLog())
    hasher = BlockHasher(root, BLOCK_SIZE)
    scheduler = Scheduler(SchedulerConfig(max_num_batched_tokens=budget), limits, pool, hasher)
    found = ResolvedEngineConfig(
        limits=limits,
        dtype="int64",
        kv_dtype="int64",
        page_bytes=executor.layout.page_bytes(0),
        model_fingerprint="fake",
        root_key=root,
        layout=executor.layout,
    )
    pages = EnginePages(scheduler, pool, hasher, executor, [executor.path])
    return Engine(executor, scheduler, pool, pages, found)
