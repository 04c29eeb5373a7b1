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
from pageray.cluster.block_keys import DIGEST_BITS, BlockHasher, root_key
from pageray.cluster.block_pool import BlockPool
from pageray.cluster.page_layout import PoolLayout
from pageray.cluster.scheduler import Scheduler, SchedulerConfig
from pageray.cluster.step import StepPlan, StepResult
from pageray.workers.engine import Engine, ResolvedEngineConfig
from pageray.workers.engine_pages import EnginePages
from pageray.workers.ranks.messages import RankReport

BLOCK_SIZE = 4
SLOT_BYTES = 8
NUM_LAYERS = 3


class FakeExecutor:
    """One rank of `NUM_LAYERS` layers and one KV head. K of every layer holds the digests; they
    are written layer by layer, `before_layer` being called in between."""

    def __init__(self, num_blocks: int, before_layer: Callable[[], object]) -> None:
        self.layout = PoolLayout(
            num_layers=NUM_LAYERS,
            block_size=BLOCK_SIZE,
            head_dim=1,
            element_bytes=SLOT_BYTES,
            shards=((0, 1),),
        )
        self._before_layer = before_layer
        self._memfd = os.memfd_create("fake-pool", os.MFD_CLOEXEC)
        os.ftruncate(self._memfd, (num_blocks + 1) * self.layout.page_bytes(0))
        memory = np.frombuffer(mmap.mmap(self._memfd, 0), np.int64)
        self._k_BLP = memory.reshape(num_blocks + 1, NUM_LAYERS, 2, BLOCK_SIZE)[:, :, 0, :]
        self.ranks = FakeRanks(num_blocks, BLOCK_SIZE)
        # A view: what a transfer writes is what the next step reads.
        self.ranks.slots = self._k_BLP[:, 0, :]  # type: ignore[assignment]
        self._progress = (0, NUM_LAYERS)

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._memfd}"

    def load(self) -> list[RankReport]:
        raise NotImplementedError

    def allocate(self, num_blocks: int) -> list[str | None]:
        return [self.path]

    def execute(self, plan: StepPlan) -> StepResult:
        self._progress = (plan.step_id, 0)
        self._before_layer()
        for source, destination in plan.copies:
            self._k_BLP[destination, 1:] = self._k_BLP[source, 1:]
        result = self.ranks.execute(plan)
        self._progress = (plan.step_id, 1)
        for layer in range(1, NUM_LAYERS):
            self._before_layer()
            self._write(plan, layer)
            self._progress = (plan.step_id, layer + 1)
        return result

    def _write(self, plan: StepPlan, layer: int) -> None:
        """Write the chunks' slots as in layer 0, and compare what is read with layer 0."""
        for chunk in plan.chunks:
            table = self.ranks.known[chunk.sequence_id].table
            end = chunk.start + chunk.num_tokens
            for position in range(end):
                slot = table[position // BLOCK_SIZE], position % BLOCK_SIZE
                digest = self._k_BLP[slot[0], 0, slot[1]]
                if position >= chunk.start:
                    self._k_BLP[slot[0], layer, slot[1]] = digest
                assert self._k_BLP[slot[0], layer, slot[1]] == digest, (
                    f"foreign KV in layer {layer} of block {slot[0]}, slot {slot[1]}"
                )

    def num_layers_written(self, step_id: int) -> int:
        step, layers = self._progress
        return layers if step == step_id else NUM_LAYERS if step > step_id else 0

    def wait_until_written(self, step_id: int) -> None:
        """A step is written when it is acknowledged."""

    def check_alive(self) -> None:
        """Nothing here can die."""

    def shutdown(self) -> None:
        os.close(self._memfd)


def fake_engine(
    num_blocks: int,
    *,
    budget: int = 32,
    before_layer: Callable[[], object] = time.time,
    digest_bits: int = DIGEST_BITS,
) -> Engine:
    """`before_layer` is called in the engine's thread: tests make steps long with it.
    `digest_bits`: few, and block keys collide."""
    executor = FakeExecutor(num_blocks, before_layer)
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
    hasher = BlockHasher(root, BLOCK_SIZE, digest_bits)
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
