"""Several engines and their coordinator in one process and event loop, without Ray.

The engines are real but for their ranks (`fake_engine`), and so are page services and
coordinator; only the way between engine and coordinator is a plain call.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from engine_process import SECRET
from fake_engine import fake_engine
from pageray.cluster.block_keys import DIGEST_BITS
from pageray.cluster.coordinator.coordinator import Coordinator
from pageray.cluster.coordinator.errors import CoordinatorUnavailableError
from pageray.cluster.coordinator.messages import (
    EngineInfo,
    EngineLoad,
    EngineReply,
    EventBatch,
    Heartbeat,
    Holder,
    Location,
    Role,
    Snapshot,
)
from pageray.cluster.generation import GenerateRequest
from pageray.cluster.ids import BlockKey, EngineId, Epoch
from pageray.workers.async_engine import AsyncEngine
from pageray.workers.engine import Engine
from pageray.workers.page_service.cluster_link import ClusterLink
from pageray.workers.page_service.page_agent import PageAgent
from pageray.workers.page_service.prefetcher import Prefetcher


class LocalCoordinator:
    """The coordinator's client, without a way in between. `is_down` cuts it."""

    def __init__(self) -> None:
        self.inner = Coordinator()
        self.is_down = False

    def restart(self) -> None:
        self.inner = Coordinator()

    async def register(self, info: EngineInfo) -> EngineReply:
        return self._up().register(info, time.monotonic())

    async def heartbeat(self, heartbeat: Heartbeat) -> EngineReply:
        return self._up().heartbeat(heartbeat, time.monotonic())

    async def apply(self, batch: EventBatch) -> EngineReply:
        return self._up().apply(batch)

    async def restore(self, snapshot: Snapshot) -> EngineReply:
        return self._up().restore(snapshot)

    async def deregister(self, engine_id: EngineId, epoch: Epoch) -> None:
        self._up().deregister(engine_id, epoch)

    async def locate(self, root_key: BlockKey, keys: tuple[BlockKey, ...]) -> Location:
        return self._up().locate(root_key, keys, time.monotonic())

    async def best_holder(
        self, root_key: BlockKey, keys: tuple[BlockKey, ...], *, min_blocks: int, exclude: EngineId
    ) -> Holder | None:
        return self._up().best_holder(
            root_key, keys, min_blocks=min_blocks, exclude=exclude, now_s=time.monotonic()
        )

    async def end_lease(self, lease_id: int) -> None:
        self._up().end_lease(lease_id)

    def _up(self) -> Coordinator:
        if self.is_down:
            raise CoordinatorUnavailableError("it is down in this test.")
        return self.inner


@dataclass
class Member:
    """An engine in the cluster."""

    engine: Engine
    runner: AsyncEngine
    agent: PageAgent
    link: ClusterLink
    prefetcher: Prefetcher

    async def generate(self, request: GenerateRequest) -> list[int]:
        """Prefetch, then run, as `AsyncEngine` does for a member: the output tokens."""
        await self.prefetcher.prefetch(request, 1_000.0, can_ask=self.link.is_registered)
        tokens: list[int] = []
        async for output in self.runner.generate(request):
            tokens += output.sequences[0].token_ids
        return tokens

    @property
    def num_computed_tokens(self) -> int:
        return self.engine.stats().num_computed_tokens


_epochs = itertools.count(1)


def start_member(
    coordinator: LocalCoordinator,
    name: str,
    *,
    role: Role = "both",
    num_blocks: int = 200,
    memory_id: str | None = None,
    digest_bits: int = DIGEST_BITS,
) -> Member:
    engine = fake_engine(num_blocks, digest_bits=digest_bits)
    runner = AsyncEngine(engine)
    agent = PageAgent(
        engine,
        engine_id=EngineId(name),
        epoch=Epoch(next(_epochs)),
        secret=SECRET,
        role=role,
        prefills=None if role == "decode" else runner,
        memory_id=memory_id,
    )
    prefetcher = Prefetcher(engine.pages, agent, coordinator)

    def load() -> EngineLoad:
        runner.check_health()
        return EngineLoad(prefill_tokens_per_s=1_000.0)

    link = ClusterLink(coordinator, agent.info, engine.pages, load)
    return Member(engine, runner, agent, link, prefetcher)


def stop_member(member: Member) -> None:
    member.link.close()
    member.prefetcher.close()
    member.agent.close()
    member.runner.shutdown()


@asynccontextmanager
async def cluster_of(
    coordinator: LocalCoordinator, roles: dict[str, Role], *, is_one_host: bool = True
) -> AsyncGenerator[dict[str, Member]]:
    """Without `is_one_host` pages go through sockets, as between machines."""
    members = {
        name: start_member(coordinator, name, role=role, memory_id=None if is_one_host else name)
        for name, role in roles.items()
    }
    try:
        await until(lambda: len(coordinator.inner.engines) == len(members))
        yield members
    finally:
        for member in members.values():
            await asyncio.to_thread(stop_member, member)


async def until(is_true: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Wait for something that other tasks or threads bring about."""
    async with asyncio.timeout(timeout_s):
        while not is_true():
            await asyncio.sleep(0.005)
