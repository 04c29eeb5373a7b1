"""Source end of pages over a gRPC byte stream (`grpc_stream.py`)."""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, cast

import grpc

from pageray.cluster.ids import TransferId
from pageray.workers.transfer.frame_batches import FRAME_BYTES, OutgoingFrame, frames_of
from pageray.workers.transfer.frames import FrameError, Status, parse_reply
from pageray.workers.transfer.grpc_stream import METHOD, SECRET_KEY, SERVICE
from pageray.workers.transfer.outgoing import OutgoingPages
from pageray.workers.transfer.page_write import PageWrite
from pageray.workers.transfer.page_writer import (
    ShouldStop,
    TransferError,
    check_stop,
    never,
)

MESSAGE_BYTES = FRAME_BYTES + (64 << 10)
"""So that a frame with its header is one message, unless a single page is larger."""
DEFAULT_TIMEOUT_S = 60.0
_GLANCE_S = 0.2
"""While the peer takes nothing, the source asks this often whether to stop."""


class _Call(Protocol):
    def result(self, timeout: float) -> bytes: ...
    def cancel(self) -> bool: ...


class GrpcStreamWriter:
    """A `PageWriter` over somebody else's channel, which `close` leaves open."""

    def __init__(
        self,
        outgoing: OutgoingPages,
        channel: grpc.Channel,
        secret: bytes,
        *,
        with_checksums: bool = True,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """`timeout_s`: for one whole `write`."""
        self._outgoing = outgoing
        self._secret = secret
        self._with_checksums = with_checksums
        self._timeout_s = timeout_s
        self._start = cast(
            "Callable[..., _Call]", channel.stream_unary(f"/{SERVICE}/{METHOD}").future
        )

    def write(
        self, transfer_id: TransferId, writes: Sequence[PageWrite], should_stop: ShouldStop = never
    ) -> list[int]:
        if not writes:
            return []
        self._outgoing.check(writes)
        check_stop(should_stop, transfer_id)
        frames = frames_of(self._outgoing, transfer_id, writes, with_checksums=self._with_checksums)
        sending = _Sending(frames, should_stop)
        call = self._start(
            sending.messages(),
            timeout=self._timeout_s,
            metadata=((SECRET_KEY, self._secret),),
        )
        try:
            status, replied_id = parse_reply(_result(call, should_stop, transfer_id))
        except (grpc.RpcError, grpc.FutureCancelledError, FrameError) as error:
            check_stop(sending.has_stopped, transfer_id)
            raise TransferError(f"transfer {transfer_id} over gRPC: {error}") from error
        finally:
            call.cancel()
            sending.close()
        if replied_id != transfer_id or status is not Status.COUNTED:
            raise TransferError(f"transfer {transfer_id}: answer {status.name} for {replied_id}.")
        return sending.checksums

    def close(self) -> None:
        """Nothing to let go of."""


class _Sending:
    """The request messages of one call, taken by a thread of gRPC's."""

    def __init__(self, frames: Iterator[OutgoingFrame], should_stop: ShouldStop) -> None:
        self._frames = frames
        self._should_stop = should_stop
        self._lock = threading.Lock()
        self._is_closed = False
        self._has_stopped = False
        self.checksums: list[int] = []

    def has_stopped(self) -> bool:
        return self._has_stopped

    def messages(self) -> Iterator[bytes]:
        """Ends early after `close` or a stop; the receiver then throws away what it cannot use."""
        while True:
            messages = self._next_frame()
            if not messages:
                return
            yield from messages

    def close(self) -> None:
        """When this returns, the source's pages are not read any more."""
        with self._lock:
            self._is_closed = True

    def _next_frame(self) -> list[bytes]:
        with self._lock:
            self._has_stopped = self._has_stopped or self._should_stop()
            frame = None if self._is_closed or self._has_stopped else next(self._frames, None)
            if frame is None:
                return []
            self.checksums += frame.checksums
            return list(_cut(frame))


def _result(call: _Call, should_stop: ShouldStop, transfer_id: TransferId) -> bytes:
    """The call's deadline ends it; asks now and then whether to stop before."""
    while True:
        try:
            return call.result(_GLANCE_S)
        except grpc.FutureTimeoutError:
            check_stop(should_stop, transfer_id)


def _cut(frame: OutgoingFrame) -> Iterator[bytes]:
    """The frame as copies of at most `MESSAGE_BYTES`."""
    pieces: list[bytes | memoryview] = [frame.header]
    room = MESSAGE_BYTES - len(frame.header)
    for part in frame.payload:
        rest = part.data
        while rest.nbytes:
            piece, rest = rest[:room], rest[room:]
            pieces.append(piece)
            room -= piece.nbytes
            if room == 0:
                yield b"".join(pieces)
                pieces, room = [], MESSAGE_BYTES
    if pieces:
        yield b"".join(pieces)
