"""Source end of pages over TCP: scatter/gather straight from the page slots."""

import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from pageray.cluster.ids import TransferId
from pageray.workers.transfer.frame_batches import frames_of
from pageray.workers.transfer.frames import REPLY_BYTES, FrameError, Status, parse_reply
from pageray.workers.transfer.handshake import HandshakeError, introduce
from pageray.workers.transfer.outgoing import OutgoingPages
from pageray.workers.transfer.page_write import PageWrite
from pageray.workers.transfer.page_writer import ShouldStop, TransferError, check_stop, never
from pageray.workers.transfer.socket_options import tune

DEFAULT_TIMEOUT_S = 30.0
_MAX_BUFFERS = 512
_GLANCE_S = 0.2
"""While the peer takes nothing, the source asks this often whether to stop."""

T = TypeVar("T")


class SocketWriter:
    """A `PageWriter` over one connection, made at the first write and again after a failure."""

    def __init__(
        self,
        outgoing: OutgoingPages,
        address: str,
        secret: bytes,
        *,
        with_checksums: bool = True,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """`address`: host:port of the destination's `PageSocketServer`. `timeout_s`: how long the
        peer may take for nothing at all (connect, take bytes, reply)."""
        self._outgoing = outgoing
        self._address = address
        self._secret = secret
        self._with_checksums = with_checksums
        self._timeout_s = timeout_s
        self._connection: socket.socket | None = None

    def write(
        self, transfer_id: TransferId, writes: Sequence[PageWrite], should_stop: ShouldStop = never
    ) -> list[int]:
        if not writes:
            return []
        self._outgoing.check(writes)
        is_done = False
        try:
            checksums = self._send(transfer_id, writes, should_stop)
            is_done = True
        except (OSError, HandshakeError, FrameError) as error:
            raise TransferError(f"transfer {transfer_id} to {self._address}: {error}") from error
        finally:
            if not is_done:
                # A frame may be half sent: the next write must not follow it on this connection.
                self.close()
        return checksums

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _send(
        self, transfer_id: TransferId, writes: Sequence[PageWrite], should_stop: ShouldStop
    ) -> list[int]:
        check_stop(should_stop, transfer_id)
        connection = self._connect()
        patience = _Patience(self._timeout_s, should_stop, transfer_id)
        checksums: list[int] = []
        frames = frames_of(self._outgoing, transfer_id, writes, with_checksums=self._with_checksums)
        for frame in frames:
            check_stop(should_stop, transfer_id)
            buffers = [memoryview(frame.header), *(part.data for part in frame.payload)]
            buffers.reverse()
            while buffers:
                num_sent = patience.during(partial(_send_some, connection, buffers))
                _drop_sent(buffers, num_sent)
            checksums += frame.checksums
        status, replied_id = parse_reply(_receive_reply(connection, patience))
        if replied_id != transfer_id or status is not Status.COUNTED:
            raise TransferError(
                f"transfer {transfer_id}: {self._address} answered {status.name} for {replied_id}."
            )
        return checksums

    def _connect(self) -> socket.socket:
        if self._connection is None:
            host, _, port = self._address.rpartition(":")
            self._connection = socket.create_connection((host, int(port)), self._timeout_s)
            introduce(self._connection, self._secret, self._timeout_s)
            tune(self._connection)
            self._connection.settimeout(_GLANCE_S)
        return self._connection


class _Patience:
    """Waits for a slow peer, but not for ever and not longer than the transfer is wanted."""

    def __init__(self, timeout_s: float, should_stop: ShouldStop, transfer_id: TransferId) -> None:
        self._timeout_s = timeout_s
        self._should_stop = should_stop
        self._transfer_id = transfer_id

    def during(self, operation: Callable[[], T]) -> T:
        """The result of `operation`, which raises TimeoutError each time the peer did nothing."""
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            try:
                return operation()
            except TimeoutError:
                check_stop(self._should_stop, self._transfer_id)
                if time.monotonic() > deadline_s:
                    raise


def _send_some(connection: socket.socket, buffers: Sequence[memoryview]) -> int:
    """The first of `buffers` stands at the end."""
    return connection.sendmsg(buffers[: -_MAX_BUFFERS - 1 : -1])


def _drop_sent(buffers: list[memoryview], num_bytes: int) -> None:
    while num_bytes:
        first = buffers.pop()
        if num_bytes < first.nbytes:
            buffers.append(first[num_bytes:])
            return
        num_bytes -= first.nbytes


def _receive_reply(connection: socket.socket, patience: _Patience) -> bytes:
    data = b""
    while len(data) < REPLY_BYTES:
        more = patience.during(partial(connection.recv, REPLY_BYTES - len(data)))
        if not more:
            raise ConnectionError("the destination hung up")
        data += more
    return data
