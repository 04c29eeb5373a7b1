"""One engine: a scheduler, a block pool and a group of ranks, advanced step by step."""

import time
from dataclasses import dataclass
from pathlib import Path

from pageray.cluster.admission import EngineLimits, resolve_max_tokens
from pageray.cluster.block_events import BlockEventLog
from pageray.cluster.block_keys import BlockHasher, root_key
from pageray.cluster.block_pool import BlockPool
from pageray.cluster.config import EngineConfig
from pageray.cluster.errors import ConfigError
from pageray.cluster.generation import GenerateRequest, RequestOutput
from pageray.cluster.ids import BlockKey, RequestId
from pageray.cluster.measured_rate import MeasuredRate
from pageray.cluster.page_layout import PoolLayout
from pageray.cluster.scheduler import Scheduler, SchedulerConfig
from pageray.workers.engine_pages import EnginePages
from pageray.workers.model_store.resolve import resolve_model
from pageray.workers.ranks.executor import Executor
from pageray.workers.ranks.launcher import ChildProcessLauncher, RankLauncher
from pageray.workers.ranks.messages import RankReport
from pageray.workers.ranks.process_executor import ProcessExecutor

_MIN_PREFILL_TOKENS = 64
"""Steps with fewer tokens say little about how fast prompts are computed."""


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """A look at an engine between two steps. Counters run since the start."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_held_blocks: int
    num_cached_blocks: int
    num_held_slots: int
    """Token slots in held blocks ..."""
    num_filled_slots: int
    """... and those of them that hold a token."""
    num_steps: int
    num_preemptions: int
    num_evictions: int
    num_computed_tokens: int
    prefix_queries_tokens: int
    prefix_hits_tokens: int
    num_queued_tokens: int
    """Tokens waiting to be computed, beside the one per running sequence and step."""
    prefill_tokens_per_s: float
    """As measured over recent steps with many tokens; 0 before the first of them."""

    @property
    def kv_usage(self) -> float:
        """Share of the blocks that are held, 0 to 1."""
        return self.num_held_blocks / self.num_blocks

    @property
    def kv_waste(self) -> float:
        """Share of held token slots without a token, 0 to 1."""
        if self.num_held_slots == 0:
            return 0.0
        return 1.0 - self.num_filled_slots / self.num_held_slots


@dataclass(frozen=True, kw_only=True)
class ResolvedEngineConfig:
    """What was found out at the start: the model's limits and what memory allows."""

    limits: EngineLimits
    dtype: str
    kv_dtype: str
    page_bytes: int
    """Of rank 0; other ranks may hold more or fewer heads."""
    model_fingerprint: str
    root_key: BlockKey
    """Engines with equal root keys can share pages ..."""
    layout: PoolLayout
    """... each in its own layout."""


class Engine:
    """One thread runs the steps; `check_request`, `check_alive` and all of `pages` are for any.

    `start` builds one; after an `EngineDeadError` it is of no more use than `shutdown`.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        pool: BlockPool,
        pages: EnginePages,
        found: ResolvedEngineConfig,
    ) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self._pool = pool
        self._lock = pages.lock
        self._prefill_rate = MeasuredRate()
        self.pages = pages
        self.found = found

    @classmethod
    def start(cls, config: EngineConfig, launcher: RankLauncher | None = None) -> "Engine":
        """Fetch or find the model, start the ranks, load, take the memory.

        Without a launcher a single rank runs in this process, more of them as child processes.
        Raises `ConfigError` or `ModelLoadError` for what the user can mend; leaves nothing behind.
        """
        config.validate()
        folder = resolve_model(config.model)
        executor = _executor(config, folder, launcher)
        try:
            found = _resolve(config, executor.load())
            pool_paths = executor.allocate(found.limits.num_blocks)
        except BaseException:
            executor.shutdown()
            raise
        limits = found.limits
        pool = BlockPool(limits.num_blocks, BlockEventLog())
        hasher = BlockHasher(found.root_key, limits.block_size)
        scheduler = Scheduler(
            SchedulerConfig(
                max_num_batched_tokens=config.max_num_batched_tokens,
                enable_prefix_caching=config.enable_prefix_caching,
                enable_chunked_prefill=config.enable_chunked_prefill,
                engine_seed=config.seed,
            ),
            limits,
            pool,
            hasher,
        )
        pages = EnginePages(scheduler, pool, hasher, executor, pool_paths)
        return cls(executor, scheduler, pool, pages, found)

    @property
    def has_requests(self) -> bool:
        return self._scheduler.has_requests

    @property
    def prefill_tokens_per_s(self) -> float:
        """See `EngineStats`."""
        return self._prefill_rate.per_s()

    def check_request(self, request: GenerateRequest) -> None:
        """Raise the `ClientError` that `add` would raise for what can never be served."""
        resolve_max_tokens(request, self.found.limits)

    def add(self, request: GenerateRequest) -> None:
        with self._lock:
            self._scheduler.add(request)

    def abort(self, request_id: RequestId) -> bool:
        with self._lock:
            return self._scheduler.abort(request_id)

    def finish_sequence(self, request_id: RequestId, index: int) -> bool:
        with self._lock:
            return self._scheduler.finish_sequence(request_id, index)

    def step(self) -> list[RequestOutput]:
        """Run one step, if there is anything to compute, and return its news."""
        with self._lock:
            plan = self._scheduler.schedule()
        if plan is None:
            return []
        started_s = time.monotonic()
        result = self._executor.execute(plan)
        if plan.num_tokens >= _MIN_PREFILL_TOKENS:
            self._prefill_rate.observe(plan.num_tokens, time.monotonic() - started_s)
        with self._lock:
            outputs = self._scheduler.update(result)
            self.pages.acknowledged(plan.step_id)
        return outputs

    def stats(self) -> EngineStats:
        with self._lock:
            return self._stats()

    def _stats(self) -> EngineStats:
        held_slots, filled_slots = self._scheduler.slot_usage()
        counters = self._scheduler.stats
        return EngineStats(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_blocks=self._pool.num_blocks,
            num_held_blocks=self._pool.num_held,
            num_cached_blocks=self._pool.num_cached,
            num_held_slots=held_slots,
            num_filled_slots=filled_slots,
            num_steps=counters.num_steps,
            num_preemptions=counters.num_preemptions,
            num_evictions=self._pool.num_evictions,
            num_computed_tokens=counters.num_computed_tokens,
            prefix_queries_tokens=counters.prefix_queries_tokens,
            prefix_hits_tokens=counters.prefix_hits_tokens,
            num_queued_tokens=self._scheduler.num_queued_tokens,
            prefill_tokens_per_s=self._prefill_rate.per_s(),
        )

    def check_invariants(self) -> None:
        with self._lock:
            self.pages.check_invariants()

    def check_alive(self) -> None:
        """Raise `EngineDeadError` if a rank is gone."""
        self._executor.check_alive()

    def clear_prefix_cache(self) -> None:
        """Forget every cached prefix; running sequences keep their blocks."""
        with self._lock:
            self.pages.clear_prefix_cache()

    def shutdown(self) -> None:
        self._executor.shutdown()


def _executor(config: EngineConfig, folder: Path, launcher: RankLauncher | None) -> Executor:
    if launcher is None and config.tensor_parallel_size == 1:
        # Imported only here: it brings torch, which an engine with rank processes never needs.
        from pageray.workers.ranks.in_process import InProcessExecutor

        return InProcessExecutor(config, folder)
    return ProcessExecutor(config, folder, launcher or ChildProcessLauncher())


def _resolve(config: EngineConfig, reports: list[RankReport]) -> ResolvedEngineConfig:
    first = reports[0]
    max_model_len = config.max_model_len or first.max_position
    if max_model_len > first.max_position:
        raise ConfigError(
            f"max_model_len is {max_model_len}, but the model's context is "
            f"{first.max_position} tokens."
        )
    if not config.enable_chunked_prefill and config.max_num_batched_tokens < max_model_len:
        raise ConfigError(
            f"Without chunked prefill a prompt is computed in one step, but "
            f"max_num_batched_tokens ({config.max_num_batched_tokens}) is below max_model_len "
            f"({max_model_len}). Raise the first or lower the second."
        )
    limits = EngineLimits(
        vocab_size=first.vocab_size,
        max_model_len=max_model_len,
        # A block has the same number on every rank: the rank with the least room decides.
        num_blocks=min(report.max_blocks for report in reports),
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        eos_token_ids=first.eos_token_ids,
    )
    return ResolvedEngineConfig(
        limits=limits,
        dtype=first.dtype,
        kv_dtype=first.kv_dtype,
        page_bytes=first.page_bytes,
        model_fingerprint=first.model_fingerprint,
        root_key=root_key(first.model_fingerprint, first.kv_dtype, config.block_size),
        layout=PoolLayout(
            num_layers=first.num_layers,
            block_size=config.block_size,
            head_dim=first.head_dim,
            element_bytes=first.kv_element_bytes,
            shards=tuple(report.kv_heads for report in reports),
        ),
    )
