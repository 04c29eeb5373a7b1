"""`workers/page_service/cluster_link.py` in simulated time: message by message the same."""

from collections.abc import Callable

from pageray.cluster.block_pool import BlockPool
from pageray.cluster.coordinator.coordinator import Coordinator
from pageray.cluster.coordinator.errors import CoordinatorUnavailableError
from pageray.cluster.coordinator.messages import (
    EngineInfo,
    EngineLoad,
    EngineReply,
    EventBatch,
    Heartbeat,
    Snapshot,
)
from pageray.cluster.simulation.coordinator_port import CoordinatorPort
from pageray.cluster.simulation.event_loop import EventLoop

EVENT_PERIOD_S = 0.05
HEARTBEAT_PERIOD_S = 0.5
RETRY_S = 0.5
TIMEOUT_S = 1.0


class EngineLink:
    """`run` it in the engine's scope."""

    def __init__(
        self,
        loop: EventLoop,
        port: CoordinatorPort,
        info: EngineInfo,
        pool: BlockPool,
        load: Callable[[], EngineLoad],
    ) -> None:
        self._loop = loop
        self._port = port
        self._info = info
        self._pool = pool
        self._load = load
        self._sequence_number = 0
        self._is_stale = False
        self.is_registered = False
        """Whether the coordinator answered the last time."""

    async def run(self, first_wait_s: float) -> None:
        loop = self._loop
        await loop.sleep(first_wait_s)
        next_heartbeat_s = 0.0
        while not self._is_stale:
            try:
                if not self.is_registered:
                    await self._register()
                    next_heartbeat_s = 0.0
                await self._send_events()
                if loop.now_s >= next_heartbeat_s:
                    await self._send_heartbeat()
                    next_heartbeat_s = loop.now_s + HEARTBEAT_PERIOD_S
                await loop.sleep(EVENT_PERIOD_S)
            except CoordinatorUnavailableError:
                self.is_registered = False
                await loop.sleep(RETRY_S)

    async def _register(self) -> None:
        info = self._info

        def ask(coordinator: Coordinator, now_s: float) -> EngineReply:
            return coordinator.register(info, now_s)

        reply = await self._port.call(ask, TIMEOUT_S)
        self.is_registered = True
        await self._follow(reply)

    async def _send_events(self) -> None:
        events = self._pool.take_events()
        if events is None:
            await self._send_snapshot()
        elif events:
            self._sequence_number += 1
            batch = EventBatch(
                engine_id=self._info.engine_id,
                epoch=self._info.epoch,
                sequence_number=self._sequence_number,
                events=events,
            )
            await self._follow(await self._port.call(lambda c, _: c.apply(batch), TIMEOUT_S))

    async def _send_heartbeat(self) -> None:
        heartbeat = Heartbeat(
            engine_id=self._info.engine_id,
            epoch=self._info.epoch,
            load=self._load(),
            sequence_number=self._sequence_number,
        )

        def ask(coordinator: Coordinator, now_s: float) -> EngineReply:
            return coordinator.heartbeat(heartbeat, now_s)

        await self._follow(await self._port.call(ask, TIMEOUT_S))

    async def _send_snapshot(self) -> None:
        self._pool.take_events()
        # A number of its own: what it says was never in a batch, and a late copy of an earlier
        # snapshot must not be taken for this one.
        self._sequence_number += 1
        snapshot = Snapshot(
            engine_id=self._info.engine_id,
            epoch=self._info.epoch,
            sequence_number=self._sequence_number,
            keys=self._pool.published_keys(),
        )
        reply = await self._port.call(lambda c, _: c.restore(snapshot), TIMEOUT_S)
        self.is_registered = not reply.must_register

    async def _follow(self, reply: EngineReply) -> None:
        if reply.is_stale:
            self._is_stale = True
            self.is_registered = False
        elif reply.must_register:
            self.is_registered = False
        elif reply.must_send_snapshot:
            await self._send_snapshot()
