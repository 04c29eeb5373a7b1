"""Before a request is queued: `workers/page_service/prefetcher.py` in simulated time.

The decision whether to pull is the same function of the same numbers.
"""

from collections.abc import Sequence as SequenceOf

from pageray.cluster.block_keys import BlockContent, BlockHasher
from pageray.cluster.block_pool import BlockPool
from pageray.cluster.coordinator.coordinator import Coordinator
from pageray.cluster.coordinator.errors import CoordinatorUnavailableError
from pageray.cluster.coordinator.messages import EngineInfo, Holder
from pageray.cluster.generation import GenerateRequest
from pageray.cluster.ids import BlockKey
from pageray.cluster.prefix_run import find_run
from pageray.cluster.pull_cost import pull_s, pull_timeout_s, recompute_s
from pageray.cluster.simulation.coordinator_port import CoordinatorPort
from pageray.cluster.simulation.event_loop import EventLoop, Future, Scope
from pageray.cluster.simulation.pull import Puller

MIN_BLOCKS = 2
LOOKUP_TIMEOUT_S = 0.25


class Prefetch:
    def __init__(
        self,
        loop: EventLoop,
        scope: Scope,
        *,
        port: CoordinatorPort,
        info: EngineInfo,
        pool: BlockPool,
        hasher: BlockHasher,
        puller: Puller,
    ) -> None:
        self._loop = loop
        self._scope = scope
        self._port = port
        self._info = info
        self._pool = pool
        self._hasher = hasher
        self._puller = puller
        self._pulling: dict[BlockKey, Future[None]] = {}

    async def run(
        self, request: GenerateRequest, prefill_tokens_per_s: float, *, can_ask: bool
    ) -> None:
        """Pull what is worth it."""
        contents: list[BlockContent] = []
        self._hasher.extend(contents, request.known_token_ids[:-1], request.cache_salt)
        while True:
            num_local = len(find_run(self._pool, contents))
            if len(contents) - num_local < MIN_BLOCKS:
                return
            first_missing = contents[num_local].key
            other = self._pulling.get(first_missing)
            if other is None:
                break
            await other
        done: Future[None] = Future()
        self._pulling[first_missing] = done
        if request.pull_from is not None:
            usable = contents[: request.pull_num_blocks or len(contents)]
            if len(usable) > num_local:
                await self._pull(usable, request.pull_from, len(usable) - num_local)
        elif can_ask:
            await self._pull_from_holder(contents, num_local, prefill_tokens_per_s)
        del self._pulling[first_missing]
        done.set_result(None)

    async def _pull_from_holder(
        self, contents: list[BlockContent], num_local: int, prefill_tokens_per_s: float
    ) -> None:
        holder = await self._find(contents, num_local)
        if holder is None:
            return
        num_blocks = min(holder.num_matched_blocks, len(contents)) - num_local
        num_tokens = num_blocks * self._info.block_size
        expected_s = pull_s(num_blocks * self._puller.block_bytes, self._puller.pull_bytes_per_s)
        if expected_s < recompute_s(num_tokens, prefill_tokens_per_s):
            await self._pull(contents[: holder.num_matched_blocks], holder.info, num_blocks)
        self._loop.spawn(self._end_lease(holder.lease_id), self._scope)

    async def _find(self, contents: list[BlockContent], num_local: int) -> Holder | None:
        self._puller.counters.num_lookups += 1
        info = self._info
        keys = tuple(content.key for content in contents)

        def ask(coordinator: Coordinator, now_s: float) -> Holder | None:
            return coordinator.best_holder(
                info.root_key,
                keys,
                min_blocks=num_local + MIN_BLOCKS,
                exclude=info.engine_id,
                now_s=now_s,
            )

        try:
            return await self._port.call(ask, LOOKUP_TIMEOUT_S)
        except CoordinatorUnavailableError:
            return None

    async def _pull(
        self, contents: SequenceOf[BlockContent], source: EngineInfo, num_predicted: int
    ) -> None:
        num_bytes = num_predicted * self._puller.block_bytes
        timeout_s = pull_timeout_s(num_bytes)
        await self._puller.pull(contents, source, num_predicted, timeout_s)

    async def _end_lease(self, lease_id: int) -> None:
        try:
            await self._port.call(lambda c, _: c.end_lease(lease_id), LOOKUP_TIMEOUT_S)
        except CoordinatorUnavailableError:
            # It ends by itself.
            return
