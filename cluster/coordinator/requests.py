"""The coordinator's wire protocol: one tagged request in, one reply out, both MessagePack."""

import msgspec

from pageray.cluster.coordinator.coordinator import Coordinator
from pageray.cluster.coordinator.messages import EngineInfo, EventBatch, Heartbeat, Snapshot
from pageray.cluster.ids import BlockKey, EngineId, Epoch


class Register(msgspec.Struct, frozen=True, array_like=True, tag="register"):
    """Answered by `EngineReply`."""

    info: EngineInfo


class Beat(msgspec.Struct, frozen=True, array_like=True, tag="heartbeat"):
    """Answered by `EngineReply`."""

    heartbeat: Heartbeat


class Apply(msgspec.Struct, frozen=True, array_like=True, tag="apply"):
    """Answered by `EngineReply`."""

    batch: EventBatch


class Restore(msgspec.Struct, frozen=True, array_like=True, tag="restore"):
    """Answered by `EngineReply`."""

    snapshot: Snapshot


class Deregister(msgspec.Struct, frozen=True, array_like=True, tag="deregister"):
    """Answered by nil."""

    engine_id: EngineId
    epoch: Epoch


class Locate(msgspec.Struct, frozen=True, array_like=True, tag="locate"):
    """Answered by `Location`."""

    root_key: BlockKey
    keys: tuple[BlockKey, ...]


class FindHolder(msgspec.Struct, frozen=True, array_like=True, tag="find_holder"):
    """Answered by `Holder` or nil."""

    root_key: BlockKey
    keys: tuple[BlockKey, ...]
    min_blocks: int
    exclude: EngineId


class EndLease(msgspec.Struct, frozen=True, array_like=True, tag="end_lease"):
    """Answered by nil."""

    lease_id: int


EngineRequest = Register | Beat | Apply | Restore
"""Only an engine that is alive says these."""

Request = EngineRequest | Deregister | Locate | FindHolder | EndLease

_REQUEST = msgspec.msgpack.Decoder(Request)


class CoordinatorService:
    """A coordinator behind bytes, which remembers when an engine last spoke."""

    def __init__(self, coordinator: Coordinator, now_s: float) -> None:
        self._coordinator = coordinator
        self._last_spoken_s = now_s

    def idle_s(self, now_s: float) -> float:
        """How long no engine has said anything."""
        return now_s - self._last_spoken_s

    def expire(self, now_s: float) -> None:
        self._coordinator.expire(now_s)

    def handle(self, payload: bytes, now_s: float) -> bytes:
        """Raises `msgspec.DecodeError` on bytes that are no request."""
        request = _REQUEST.decode(payload)
        if isinstance(request, EngineRequest):
            self._last_spoken_s = now_s
        return msgspec.msgpack.encode(self._answer(request, now_s))

    def _answer(self, request: Request, now_s: float) -> msgspec.Struct | None:
        coordinator = self._coordinator
        match request:
            case Register(info=info):
                return coordinator.register(info, now_s)
            case Beat(heartbeat=heartbeat):
                return coordinator.heartbeat(heartbeat, now_s)
            case Apply(batch=batch):
                return coordinator.apply(batch)
            case Restore(snapshot=snapshot):
                return coordinator.restore(snapshot)
            case Deregister(engine_id=engine_id, epoch=epoch):
                return coordinator.deregister(engine_id, epoch)
            case Locate(root_key=root_key, keys=keys):
                return coordinator.locate(root_key, keys, now_s)
            case FindHolder():
                return coordinator.best_holder(
                    request.root_key,
                    request.keys,
                    min_blocks=request.min_blocks,
                    exclude=request.exclude,
                    now_s=now_s,
                )
            case EndLease(lease_id=lease_id):
                return coordinator.end_lease(lease_id)
