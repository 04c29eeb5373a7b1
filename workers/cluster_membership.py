"""One engine as a member of its application's cluster: found by others, and finding them."""

import time
from collections.abc import Callable

import msgspec

from pageray.cluster.coordinator.coordinator_client import CoordinatorClient
from pageray.cluster.coordinator.messages import EngineInfo, EngineLoad
from pageray.cluster.generation import GenerateRequest
from pageray.cluster.ids import Epoch
from pageray.cluster.member_spec import MemberSpec
from pageray.cluster.pull_counters import PullCounters
from pageray.workers.engine import Engine
from pageray.workers.page_service.cluster_link import ClusterLink
from pageray.workers.page_service.page_agent import PageAgent
from pageray.workers.page_service.prefetcher import Prefetcher
from pageray.workers.page_service.prefill_job import PrefillRunner

EXPORT_GRACE_S = 5.0
"""A draining engine's sequences go on elsewhere, from its pages."""


class ClusterMembership:
    """`join` starts it, on the event loop that requests come on; `close` ends it."""

    def __init__(
        self,
        engine: Engine,
        agent: PageAgent,
        link: ClusterLink,
        prefetcher: Prefetcher,
        info: EngineInfo,
    ) -> None:
        """`info`: as the others know it; without an endpoint no pages are moved."""
        self.info = info
        self._engine = engine
        self._agent = agent
        self._link = link
        self._prefetcher = prefetcher

    @classmethod
    async def join(
        cls,
        engine: Engine,
        spec: MemberSpec,
        *,
        check_health: Callable[[], None],
        prefills: PrefillRunner,
    ) -> "ClusterMembership":
        """Find or start the coordinator, open the page service, register.

        `check_health` raises `EngineDeadError` once the engine is of no more use to anyone.
        Raises `CoordinatorUnavailableError` when there is no coordinator to be had, `ConfigError`
        for an engine whose pages cannot be shared.
        """
        client = CoordinatorClient(spec.app_name)
        secret = await client.secret()
        agent = PageAgent(
            engine,
            engine_id=spec.engine_id,
            # Grows with every start, on any host whose clock is not set back by days.
            epoch=Epoch(time.time_ns()),
            secret=secret,
            host=spec.host,
            role=spec.role,
            # A decode engine's time is for its own sequences.
            prefills=None if spec.role == "decode" else prefills,
        )
        prefetcher = Prefetcher(engine.pages, agent, client)
        info = agent.info
        if not spec.moves_pages:
            info = msgspec.structs.replace(info, endpoint=None)
        link = ClusterLink(client, info, engine.pages, lambda: _load_of(engine, prefetcher))
        return cls(engine, agent, link, prefetcher, info)

    @property
    def counters(self) -> PullCounters:
        return self._prefetcher.counters

    async def prefetch(self, request: GenerateRequest) -> int:
        """Pull what the request's prompt can use; see `Prefetcher.prefetch`."""
        if self.info.endpoint is None:
            return 0
        return await self._prefetcher.prefetch(
            request, self._engine.prefill_tokens_per_s, can_ask=self._link.is_registered
        )

    def close(self) -> None:
        """Stop sharing, once pages that others are reading now have been read. Blocks, from any
        thread; the coordinator hears of it by silence."""
        self._link.close()
        self._prefetcher.close()
        self._agent.close(grace_s=EXPORT_GRACE_S)


def _load_of(engine: Engine, prefetcher: Prefetcher) -> EngineLoad:
    stats = engine.stats()
    return EngineLoad(
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        num_queued_tokens=stats.num_queued_tokens,
        num_free_blocks=stats.num_blocks - stats.num_held_blocks,
        prefill_tokens_per_s=stats.prefill_tokens_per_s,
        pull_bytes_per_s=prefetcher.pull_bytes_per_s,
    )
