"""The coordinator full of blocks: its memory, and the time of lookups and events on one core.

The calls measured are those that the coordinator's actor makes, without the actor: neither Ray nor
the encoding of messages is in the figures. Times are CPU time of the one thread that works, so that
what else runs on the machine counts only through the caches and the memory it shares.
"""

import gc
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from pageray.cluster.coordinator.coordinator import Coordinator
from pageray.cluster.coordinator.messages import BlocksStored, EngineInfo, EventBatch, Snapshot
from pageray.cluster.ids import BlockKey, EngineId, Epoch
from pageray.cluster.page_layout import PoolLayout
from pageray.router.bench.summary import summarize

_KEY_BYTES = 32
_BATCH_BLOCKS = 128
_ROOT = BlockKey(bytes(_KEY_BYTES))
_PROMPTS_PER_SYSTEM_PROMPT = 20
_NUM_PROMPTS_ASKED = 400
_ROUNDS = 10


@dataclass(frozen=True, kw_only=True)
class CoordinatorLoad:
    """`num_engines` engines that hold equally many of `num_entries` blocks.

    There are prompts of `prompt_blocks` blocks; twenty at a time begin with the same sixteenth, a
    system prompt. An engine holds prompts drawn at random, each up to a random depth. A prompt is
    drawn by 2.5 engines on average, its system prompt by about 50.
    """

    num_entries: int
    num_engines: int
    prompt_blocks: int
    seed: int = 0

    @property
    def blocks_per_engine(self) -> int:
        return self.num_entries // self.num_engines

    @property
    def num_prompts(self) -> int:
        # Drawn to half their depth on average, 2.5 times each.
        return max(1, 2 * self.num_entries // self.prompt_blocks * 2 // 5)

    def prompt(self, number: int) -> tuple[BlockKey, ...]:
        """The same keys at every call, so that nobody has to keep them."""
        num_shared = self.prompt_blocks // 16
        group = number // _PROMPTS_PER_SYSTEM_PROMPT
        shared = self._keys(f"system prompt {group}", num_shared)
        return shared + self._keys(f"prompt {number}", self.prompt_blocks - num_shared)

    def held_by(self, engine: int) -> Iterator[tuple[BlockKey, ...]]:
        """What an engine stores, one batch after the other: exactly `blocks_per_engine` keys."""
        rng = random.Random(f"{self.seed} engine {engine}")
        seen: set[BlockKey] = set()
        while len(seen) < self.blocks_per_engine:
            depth = rng.randint(1, self.prompt_blocks)
            chain = self.prompt(rng.randrange(self.num_prompts))[:depth]
            fresh = (key for key in chain if key not in seen)
            keys = tuple(islice(fresh, self.blocks_per_engine - len(seen)))
            seen.update(keys)
            for start in range(0, len(keys), _BATCH_BLOCKS):
                yield keys[start : start + _BATCH_BLOCKS]

    def _keys(self, name: str, count: int) -> tuple[BlockKey, ...]:
        data = random.Random(f"{self.seed} {name}").randbytes(count * _KEY_BYTES)
        ends = range(_KEY_BYTES, len(data) + 1, _KEY_BYTES)
        return tuple(BlockKey(data[end - _KEY_BYTES : end]) for end in ends)


@dataclass(frozen=True, kw_only=True)
class CoordinatorFigures:
    """What one run gave."""

    entries: int
    """(engine, block) pairs in the table."""
    engines: int
    prompt_blocks: int
    bytes_per_entry: float
    """Growth of the process's resident memory, over `entries`."""
    lookups_per_s: float
    lookup_p99_ms: float
    matched_blocks_per_s: float
    """Blocks of the prompt that the engine with the longest run holds, over the lookups' time."""
    events_per_s: float
    """Blocks stored, over the time to apply them in batches of 128."""


def measure_coordinator(
    load: CoordinatorLoad, on_entries: Callable[[int], object]
) -> CoordinatorFigures:
    """Fill a coordinator, then ask it where prompts are held.

    `on_entries` is told how many entries each engine added.
    """
    coordinator = Coordinator(heartbeat_timeout_s=1e9)
    gc.collect()
    before_bytes = _resident_bytes()
    storing_s = 0.0
    for engine in range(load.num_engines):
        storing_s += _fill(coordinator, load, engine)
        on_entries(load.blocks_per_engine)
    gc.collect()
    grown_bytes = _resident_bytes() - before_bytes
    entries = coordinator.table.num_entries
    samples_s, num_matched = _ask(coordinator, load)
    return CoordinatorFigures(
        entries=entries,
        engines=load.num_engines,
        prompt_blocks=load.prompt_blocks,
        bytes_per_entry=grown_bytes / entries,
        lookups_per_s=len(samples_s) / sum(samples_s),
        lookup_p99_ms=1e3 * summarize(samples_s)["p99"],
        matched_blocks_per_s=num_matched / sum(samples_s),
        events_per_s=entries / storing_s,
    )


def _fill(coordinator: Coordinator, load: CoordinatorLoad, engine: int) -> float:
    """Register an engine and apply its events: the CPU seconds spent in applying."""
    info = _engine_info(load, engine)
    engine_id, epoch = info.engine_id, info.epoch
    coordinator.register(info, 0.0)
    coordinator.restore(Snapshot(engine_id=engine_id, epoch=epoch, sequence_number=0, keys=()))
    elapsed_s = 0.0
    for number, keys in enumerate(load.held_by(engine), start=1):
        batch = EventBatch(
            engine_id=engine_id,
            epoch=epoch,
            sequence_number=number,
            events=(BlocksStored(keys=keys),),
        )
        start_s = time.thread_time()
        reply = coordinator.apply(batch)
        elapsed_s += time.thread_time() - start_s
        assert not reply.must_send_snapshot
    return elapsed_s


def _ask(coordinator: Coordinator, load: CoordinatorLoad) -> tuple[list[float], int]:
    """CPU seconds of each lookup, and the longest runs found, added up."""
    rng = random.Random(load.seed)
    prompts = [
        load.prompt(rng.randrange(load.num_prompts))
        for _ in range(min(_NUM_PROMPTS_ASKED, load.num_prompts))
    ]
    samples_s: list[float] = []
    num_matched = 0
    for _ in range(_ROUNDS):
        for prompt in prompts:
            start_s = time.thread_time()
            location = coordinator.locate(_ROOT, prompt, 0.0)
            samples_s.append(time.thread_time() - start_s)
            num_matched += max(view.num_matched_blocks for view in location.engines)
    return samples_s, num_matched


def _engine_info(load: CoordinatorLoad, engine: int) -> EngineInfo:
    return EngineInfo(
        engine_id=EngineId(f"engine-{engine:05d}"),
        epoch=Epoch(1),
        root_key=_ROOT,
        block_size=16,
        num_blocks=load.blocks_per_engine,
        layout=PoolLayout(
            num_layers=32, block_size=16, head_dim=128, element_bytes=2, shards=((0, 8),)
        ),
    )


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
