"""Calls to other engines' page services."""

import threading
from collections import OrderedDict

import grpc

from pageray.cluster.coordinator.messages import EngineInfo
from pageray.workers.page_service.control import PushStream, call_cancel, call_push, connect
from pageray.workers.page_service.messages import (
    CancelRequest,
    decode_cancel_reply,
    encode,
)
from pageray.workers.transfer.page_writer import TransferError

MAX_CHANNELS = 256
_CANCEL_TIMEOUT_S = 2.0


class Peers:
    """Channels by address, kept open. Thread-safe."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._lock = threading.Lock()
        self._channels: OrderedDict[str, grpc.Channel] = OrderedDict()

    def push(self, source: EngineInfo, request: bytes, timeout_s: float) -> PushStream:
        """Ask `source` to push. Raises `TransferError` when it has no page service."""
        return call_push(self._channel(source), request, timeout_s, self._secret)

    def cancel(self, source: EngineInfo, request: CancelRequest) -> bool:
        """Whether the transfer is known to have stopped. Raises `grpc.RpcError`."""
        channel = self._channel(source)
        reply = call_cancel(channel, encode(request), _CANCEL_TIMEOUT_S, self._secret)
        return decode_cancel_reply(reply).is_stopped

    def channel(self, peer: EngineInfo) -> grpc.Channel:
        """Of this object: do not close it. Raises `TransferError` as `push` does."""
        return self._channel(peer)

    def close(self) -> None:
        with self._lock:
            channels = list(self._channels.values())
            self._channels.clear()
        for channel in channels:
            channel.close()

    def _channel(self, peer: EngineInfo) -> grpc.Channel:
        if peer.endpoint is None:
            raise TransferError(f"{peer.engine_id} has no page service.")
        address = peer.endpoint.control_address
        oldest: grpc.Channel | None = None
        with self._lock:
            if address not in self._channels:
                self._channels[address] = connect(address)
                if len(self._channels) > MAX_CHANNELS:
                    _, oldest = self._channels.popitem(last=False)
            self._channels.move_to_end(address)
            channel = self._channels[address]
        if oldest is not None:
            oldest.close()
        return channel
