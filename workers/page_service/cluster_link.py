"""Keeps the coordinator informed about one engine: who it is, what it holds, how busy it is."""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from pageray.cluster.coordinator.errors import CoordinatorUnavailableError
from pageray.cluster.coordinator.messages import (
    EngineInfo,
    EngineLoad,
    EngineReply,
    EventBatch,
    Heartbeat,
    Snapshot,
)
from pageray.cluster.errors import EngineDeadError
from pageray.cluster.ids import EngineId, Epoch
from pageray.workers.engine_pages import EnginePages

logger = logging.getLogger(__name__)

EVENT_PERIOD_S = 0.05
HEARTBEAT_PERIOD_S = 0.5
RETRY_S = 0.5


class EngineRegistry(Protocol):
    """The part of the coordinator that engines talk to. All raise
    `CoordinatorUnavailableError`."""

    async def register(self, info: EngineInfo) -> EngineReply: ...
    async def heartbeat(self, heartbeat: Heartbeat) -> EngineReply: ...
    async def apply(self, batch: EventBatch) -> EngineReply: ...
    async def restore(self, snapshot: Snapshot) -> EngineReply: ...
    async def deregister(self, engine_id: EngineId, epoch: Epoch) -> None: ...


class ClusterLink:
    """Runs as a task of one event loop until `close`."""

    def __init__(
        self,
        registry: EngineRegistry,
        info: EngineInfo,
        pages: EnginePages,
        load: Callable[[], EngineLoad],
    ) -> None:
        """`load` raises `EngineDeadError` when there is no engine any more: its end is reported."""
        self._registry = registry
        self._info = info
        self._pages = pages
        self._load = load
        self._sequence_number = 0
        self._is_stale = False
        self.is_registered = False
        """Whether the coordinator answered the last time; without it nobody need be asked."""
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._run())

    def close(self) -> None:
        """Say nothing more. Any thread may call it."""
        self._loop.call_soon_threadsafe(self._task.cancel)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        next_heartbeat_s = 0.0
        while not self._is_stale:
            try:
                if not self.is_registered:
                    await self._register()
                    next_heartbeat_s = 0.0
                await self._send_events()
                if loop.time() >= next_heartbeat_s:
                    await self._send_heartbeat()
                    next_heartbeat_s = loop.time() + HEARTBEAT_PERIOD_S
                await asyncio.sleep(EVENT_PERIOD_S)
            except CoordinatorUnavailableError as error:
                if self.is_registered:
                    logger.warning("Prefixes are shared in this engine only: %s", error)
                self.is_registered = False
                await asyncio.sleep(RETRY_S)
            except EngineDeadError:
                await self._say_goodbye()
                return

    async def _say_goodbye(self) -> None:
        self.is_registered = False
        try:
            await self._registry.deregister(self._info.engine_id, self._info.epoch)
        except CoordinatorUnavailableError as error:
            # It will miss the heartbeats.
            logger.info("not deregistered: %s", error)

    async def _register(self) -> None:
        reply = await self._registry.register(self._info)
        self.is_registered = True
        await self._follow(reply)

    async def _send_events(self) -> None:
        events = self._pages.take_events()
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
            await self._follow(await self._registry.apply(batch))

    async def _send_heartbeat(self) -> None:
        heartbeat = Heartbeat(
            engine_id=self._info.engine_id,
            epoch=self._info.epoch,
            load=self._load(),
            sequence_number=self._sequence_number,
        )
        await self._follow(await self._registry.heartbeat(heartbeat))

    async def _send_snapshot(self) -> None:
        # A number of its own: what it says was never in a batch, and a late copy of an earlier
        # snapshot must not be taken for this one.
        self._sequence_number += 1
        snapshot = Snapshot(
            engine_id=self._info.engine_id,
            epoch=self._info.epoch,
            sequence_number=self._sequence_number,
            keys=self._pages.take_snapshot(),
        )
        reply = await self._registry.restore(snapshot)
        self.is_registered = not reply.must_register

    async def _follow(self, reply: EngineReply) -> None:
        if reply.is_stale:
            logger.error("%s has a newer epoch: this one is silent.", self._info.engine_id)
            self._is_stale = True
            self.is_registered = False
        elif reply.must_register:
            self.is_registered = False
        elif reply.must_send_snapshot:
            await self._send_snapshot()
