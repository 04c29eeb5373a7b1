"""Pages over a gRPC byte stream, for hosts that can reach each other by gRPC only.

One call per `write`: the request stream is the byte stream of frames, cut into messages anywhere;
the response is the reply to the last frame. Bytes go through as they are (no protobuf). gRPC
copies each of them once more on either side than a socket does.

The secret is in the metadata of each call: on a channel without TLS, private networks only.
"""

import hmac
import logging
from collections.abc import Iterator, Sequence
from typing import Protocol

import grpc
import numpy as np

from pageray.workers.transfer.arrivals import Arrivals
from pageray.workers.transfer.frame_receiver import FrameReceiver, StreamEndedError
from pageray.workers.transfer.frames import FrameError, pack_reply
from pageray.workers.transfer.landing import UnexpectedWriteError
from pageray.workers.transfer.mapped_pages import ByteArray

_logger = logging.getLogger(__name__)

SERVICE = "pageray.PageStream"
METHOD = "Write"
SECRET_KEY = "pageray-secret-bin"
"""Metadata key; gRPC sends the values of keys that end in -bin as bytes."""


class _CallContext(Protocol):
    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]]: ...
    def abort(self, code: grpc.StatusCode, details: str) -> None: ...
    def peer(self) -> str: ...


class _Server(Protocol):
    def add_generic_rpc_handlers(
        self, generic_rpc_handlers: Sequence[grpc.GenericRpcHandler]
    ) -> None: ...


def add_page_stream(server: _Server, arrivals: Arrivals, secret: bytes) -> None:
    """Serve page writes into `arrivals` on `server`, before it is started.

    The handler blocks: each stream in progress takes one of the server's worker threads
    (`grpc.server`), or of its `migration_thread_pool` (`grpc.aio.server`).
    """
    if not secret:
        raise ValueError("a page server needs a secret.")
    handler = _PageStreamHandler(arrivals, secret)
    method: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_unary_rpc_method_handler(
        handler.receive
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE, {METHOD: method}),)
    )


class _PageStreamHandler:
    def __init__(self, arrivals: Arrivals, secret: bytes) -> None:
        self._arrivals = arrivals
        self._secret = secret

    def receive(self, messages: Iterator[bytes], context: _CallContext) -> bytes:
        """One `write` of a source."""
        given = dict(context.invocation_metadata()).get(SECRET_KEY, b"")
        if not hmac.compare_digest(_as_bytes(given), self._secret):
            _logger.warning("page stream from %s refused: wrong secret.", context.peer())
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong secret")
        try:
            return self._receive_frames(messages)
        except (FrameError, UnexpectedWriteError) as error:
            _logger.warning("page stream from %s dropped: %s", context.peer(), error)
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except StreamEndedError as ended:
            _logger.debug("page stream from %s ended: %s", context.peer(), ended)
            context.abort(grpc.StatusCode.CANCELLED, str(ended))
        raise AssertionError("abort does not return")

    def _receive_frames(self, messages: Iterator[bytes]) -> bytes:
        receiver = FrameReceiver(self._arrivals, _MessageStream(messages))
        reply = None
        while reply is None:
            reply = receiver.receive()
        return pack_reply(*reply)


class _MessageStream:
    """The `ByteStream` of a call's request messages."""

    def __init__(self, messages: Iterator[bytes]) -> None:
        self._messages = messages
        self._left: ByteArray = np.empty(0, np.uint8)

    def take(self, targets: Sequence[ByteArray]) -> int:
        num_taken = 0
        for target in targets:
            count = min(target.nbytes, self._left.nbytes)
            if not count:
                break
            target[:count] = self._left[:count]
            self._left = self._left[count:]
            num_taken += count
        return num_taken

    def wait(self) -> None:
        try:
            message = next(self._messages)
        except StopIteration:
            raise StreamEndedError("the source ended in the middle of a frame.") from None
        except grpc.RpcError as error:
            raise StreamEndedError(f"the source is gone: {error}") from error
        self._left = np.frombuffer(message, np.uint8)


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
