# pyright: basic
# Remote handles are typed by Ray at run time only; this file is the boundary.
"""How engines and routers speak to the application's coordinator."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable

import msgspec
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError

from pageray.cluster.coordinator.coordinator_actor import find_or_start_coordinator
from pageray.cluster.coordinator.errors import CoordinatorUnavailableError
from pageray.cluster.coordinator.messages import (
    EngineInfo,
    EngineReply,
    EventBatch,
    Heartbeat,
    Holder,
    Location,
    Snapshot,
)
from pageray.cluster.coordinator.requests import (
    Apply,
    Beat,
    Deregister,
    EndLease,
    FindHolder,
    Locate,
    Register,
    Request,
    Restore,
)
from pageray.cluster.ids import BlockKey, EngineId, Epoch

DEFAULT_TIMEOUT_S = 2.0
START_TIMEOUT_S = 60.0
DEFAULT_IDLE_TIMEOUT_S = 60.0

Call = Callable[[ActorHandle], Awaitable[bytes]]

_REPLY = msgspec.msgpack.Decoder(EngineReply)
_LOCATION = msgspec.msgpack.Decoder(Location)
_HOLDER = msgspec.msgpack.Decoder(Holder | None)


class CoordinatorClient:
    """Finds the coordinator, starts it when there is none, and finds it again when it has gone.

    Every method is one request with a time limit and raises `CoordinatorUnavailableError` when it
    was not answered in time; it may have been carried out all the same. All requests may be
    repeated.
    """

    def __init__(
        self,
        app_name: str,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        idle_timeout_s: float = DEFAULT_IDLE_TIMEOUT_S,
    ) -> None:
        self._app_name = app_name
        self._timeout_s = timeout_s
        self._idle_timeout_s = idle_timeout_s
        self._actor: ActorHandle | None = None
        # Used if this client is the one to start the actor, now or again.
        self._secret = secrets.token_bytes(32)

    async def secret(self) -> bytes:
        """What the application's engines prove themselves with; waits for the actor to start.

        It changes only when an application comes back after all its engines were silent.
        """
        self._secret = await self._call(lambda actor: actor.secret.remote(), START_TIMEOUT_S)
        return self._secret

    async def register(self, info: EngineInfo) -> EngineReply:
        return _REPLY.decode(await self._ask(Register(info)))

    async def heartbeat(self, heartbeat: Heartbeat) -> EngineReply:
        return _REPLY.decode(await self._ask(Beat(heartbeat)))

    async def apply(self, batch: EventBatch) -> EngineReply:
        return _REPLY.decode(await self._ask(Apply(batch)))

    async def restore(self, snapshot: Snapshot) -> EngineReply:
        return _REPLY.decode(await self._ask(Restore(snapshot)))

    async def deregister(self, engine_id: EngineId, epoch: Epoch) -> None:
        await self._ask(Deregister(engine_id, epoch))

    async def locate(self, root_key: BlockKey, keys: tuple[BlockKey, ...]) -> Location:
        return _LOCATION.decode(await self._ask(Locate(root_key, keys)))

    async def best_holder(
        self, root_key: BlockKey, keys: tuple[BlockKey, ...], *, min_blocks: int, exclude: EngineId
    ) -> Holder | None:
        """The caller holds the lease until `end_lease`, or its time is up."""
        request = FindHolder(root_key, keys, min_blocks, exclude)
        return _HOLDER.decode(await self._ask(request))

    async def end_lease(self, lease_id: int) -> None:
        await self._ask(EndLease(lease_id))

    async def _ask(self, request: Request) -> bytes:
        payload = msgspec.msgpack.encode(request)
        return await self._call(lambda actor: actor.handle.remote(payload), self._timeout_s)

    async def _call(self, call: Call, timeout_s: float) -> bytes:
        try:
            async with asyncio.timeout(timeout_s):
                try:
                    return await call(await self._find())
                except (RayActorError, ValueError):
                    # It has gone, or was going just then: find or start its successor.
                    self._actor = None
                    return await call(await self._find())
        except (RayError, ValueError, TimeoutError) as error:
            self._actor = None
            raise CoordinatorUnavailableError(
                f"The coordinator of {self._app_name!r} gave no answer within {timeout_s:g} s: "
                f"{type(error).__name__}: {error}"
            ) from error

    async def _find(self) -> ActorHandle:
        if self._actor is None:
            self._actor = await asyncio.to_thread(
                find_or_start_coordinator, self._app_name, self._secret, self._idle_timeout_s
            )
        return self._actor
