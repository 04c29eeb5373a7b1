"""Before a request is queued: are pages of its prompt somewhere else, and worth fetching?

What is pulled lands in the engine's prefix cache, where admission finds it like any other hit. So
a pull needs no place in the scheduler, runs beside other sequences' steps, and when it fails the
tokens are computed as if nothing had happened.
"""

import asyncio
import logging
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import msgspec

from pageray.cluster.block_keys import BlockContent
from pageray.cluster.coordinator.errors import CoordinatorUnavailableError
from pageray.cluster.coordinator.messages import EngineInfo, EngineView, Holder, Location
from pageray.cluster.generation import GenerateRequest
from pageray.cluster.ids import BlockKey, EngineId
from pageray.cluster.measured_rate import MeasuredRate
from pageray.cluster.placement import PlacementRequest, choose
from pageray.cluster.pull_cost import (
    MIN_MEASURED_BLOCKS,
    PULL_RATE_LIFE_S,
    pull_s,
    pull_timeout_s,
    recompute_s,
)
from pageray.cluster.pull_counters import PullCounters
from pageray.workers.engine_pages import EnginePages
from pageray.workers.page_service.page_agent import PageAgent
from pageray.workers.page_service.puller import PullCancel, PullOutcome

logger = logging.getLogger(__name__)

MIN_BLOCKS = 2
"""Fewer missing blocks are computed in less time than it takes to ask."""
LOOKUP_TIMEOUT_S = 0.25
MAX_PULLS = 8
_COMPUTE_PATIENCE = 4.0
"""A prefill engine may take so many times what its queue and rate promise."""


class HolderIndex(Protocol):
    """The part of the coordinator that knows who holds what."""

    async def best_holder(
        self, root_key: BlockKey, keys: tuple[BlockKey, ...], *, min_blocks: int, exclude: EngineId
    ) -> Holder | None: ...

    async def end_lease(self, lease_id: int) -> None: ...

    async def locate(self, root_key: BlockKey, keys: tuple[BlockKey, ...]) -> Location: ...


class Prefetcher:
    """For one event loop. Never raises for what goes wrong with a pull."""

    def __init__(self, pages: EnginePages, agent: PageAgent, index: HolderIndex) -> None:
        self._pages = pages
        self._agent = agent
        self._index = index
        self._executor = ThreadPoolExecutor(MAX_PULLS, thread_name_prefix="pageray-pull")
        self._pulling: dict[BlockKey, asyncio.Future[None]] = {}
        self._rate = MeasuredRate(PULL_RATE_LIFE_S)
        self.counters = PullCounters()

    @property
    def pull_bytes_per_s(self) -> float:
        """Measured; 0 if not, or not lately."""
        return self._rate.per_s(time.monotonic())

    async def prefetch(
        self, request: GenerateRequest, prefill_tokens_per_s: float, *, can_ask: bool
    ) -> int:
        """Pull what is worth it; how many tokens were computed elsewhere for this very request. `can_ask`: the coordinator is there; without it only the holder
        that the request itself names is asked. Cancelling breaks a pull off."""
        contents = self._pages.contents_of(request)
        while True:
            num_local = self._pages.num_local_blocks(contents)
            if len(contents) - num_local < MIN_BLOCKS:
                return 0
            first_missing = contents[num_local].key
            other = self._pulling.get(first_missing)
            if other is None:
                break
            # A sibling is bringing the same blocks: look again when it has.
            await asyncio.shield(other)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pulling[first_missing] = done
        try:
            return await self._find_and_pull(
                request, contents, num_local, prefill_tokens_per_s, can_ask
            )
        finally:
            del self._pulling[first_missing]
            done.set_result(None)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _find_and_pull(
        self,
        request: GenerateRequest,
        contents: list[BlockContent],
        num_local: int,
        prefill_tokens_per_s: float,
        can_ask: bool,
    ) -> int:
        if request.pull_from is not None:
            # Whoever named it knows that it computed these very tokens.
            usable = contents[: request.pull_num_blocks or len(contents)]
            if len(usable) > num_local:
                await self._pull(usable, request.pull_from, len(usable) - num_local)
        elif can_ask:
            await self._pull_from_holder(contents, num_local, prefill_tokens_per_s)
        if self._agent.info.role == "decode" and can_ask:
            return await self._let_compute(request, contents)
        return 0

    async def _pull_from_holder(
        self, contents: list[BlockContent], num_local: int, prefill_tokens_per_s: float
    ) -> None:
        holder = await self._find(contents, num_local)
        if holder is None:
            return
        num_blocks = min(holder.num_matched_blocks, len(contents)) - num_local
        num_tokens = num_blocks * self._agent.info.block_size
        expected_s = pull_s(num_blocks * self._agent.block_bytes, self.pull_bytes_per_s)
        try:
            if expected_s < recompute_s(num_tokens, prefill_tokens_per_s):
                usable = contents[: holder.num_matched_blocks]
                await self._pull(usable, holder.info, num_blocks)
        finally:
            await self._end_lease(holder.lease_id)

    async def _let_compute(self, request: GenerateRequest, contents: list[BlockContent]) -> int:
        """Have a prefill engine compute what is still missing. If none can, it is done here.

        Returns how many tokens it had to compute.
        """
        num_missing = len(contents) - self._pages.num_local_blocks(contents)
        if num_missing < MIN_BLOCKS:
            return 0
        views = await self._prefill_engines(contents)
        if not views:
            return 0
        now = PlacementRequest(
            num_prompt_tokens=len(request.known_token_ids), tie_break=random.getrandbits(16)
        )
        chosen = choose(views, now).ranking[0].engine_id
        view = next(view for view in views if view.info.engine_id == chosen)
        num_tokens = view.load.num_queued_tokens + len(request.known_token_ids)
        expected_s = recompute_s(num_tokens, view.load.prefill_tokens_per_s)
        outcome = await self._pull(
            contents,
            view.info,
            num_missing,
            compute=msgspec.structs.replace(request, pull_from=None),
            extra_s=_COMPUTE_PATIENCE * expected_s,
        )
        return outcome.num_computed_blocks * self._agent.info.block_size

    async def _prefill_engines(self, contents: list[BlockContent]) -> tuple[EngineView, ...]:
        try:
            async with asyncio.timeout(LOOKUP_TIMEOUT_S):
                location = await self._index.locate(
                    self._agent.info.root_key, tuple(content.key for content in contents)
                )
        except (CoordinatorUnavailableError, TimeoutError) as error:
            logger.info("no prefill engine is asked: %s", error)
            return ()
        return tuple(view for view in location.engines if view.info.role == "prefill")

    async def _find(self, contents: list[BlockContent], num_local: int) -> Holder | None:
        self.counters.num_lookups += 1
        info = self._agent.info
        try:
            async with asyncio.timeout(LOOKUP_TIMEOUT_S):
                return await self._index.best_holder(
                    info.root_key,
                    tuple(content.key for content in contents),
                    min_blocks=num_local + MIN_BLOCKS,
                    exclude=info.engine_id,
                )
        except (CoordinatorUnavailableError, TimeoutError) as error:
            logger.info("nobody is asked for pages: %s", error)
            return None

    async def _end_lease(self, lease_id: int) -> None:
        try:
            async with asyncio.timeout(LOOKUP_TIMEOUT_S):
                await self._index.end_lease(lease_id)
        except (CoordinatorUnavailableError, TimeoutError):
            # It ends by itself.
            return

    async def _pull(
        self,
        contents: list[BlockContent],
        source: EngineInfo,
        num_predicted: int,
        *,
        compute: GenerateRequest | None = None,
        extra_s: float = 0.0,
    ) -> PullOutcome:
        cancel = PullCancel()
        num_bytes = num_predicted * self._agent.block_bytes
        timeout_s = extra_s + pull_timeout_s(num_bytes)

        def work() -> PullOutcome:
            return self._agent.pull(
                contents, source, timeout_s=timeout_s, cancel=cancel, compute=compute
            )

        self.counters.num_pulls += 1
        self.counters.num_predicted_blocks += num_predicted
        try:
            outcome = await asyncio.get_running_loop().run_in_executor(self._executor, work)
        finally:
            # No harm when it has ended; when this task is cancelled the thread must not go on.
            cancel.set()
        self._count(outcome)
        if compute is None and outcome.num_blocks >= MIN_MEASURED_BLOCKS:
            self._rate.observe(outcome.num_bytes, outcome.seconds, time.monotonic())
        return outcome

    def _count(self, outcome: PullOutcome) -> None:
        self.counters.num_delivered_blocks += outcome.num_blocks
        self.counters.num_bytes += outcome.num_bytes
        self.counters.seconds += outcome.seconds
        self.counters.num_failed_pulls += outcome.failure is not None
