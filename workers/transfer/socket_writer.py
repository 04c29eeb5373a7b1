"""Source end of pages over TCP: scatter/gather straight from the page slots."""

import socket
from collections.abc import Sequence

from pageray.cluster.ids import TransferId
from pageray.workers.transfer.frame_batches import OutgoingFrame, frames_of
from pageray.workers.transfer.frames import REPLY_BYTES, FrameError, Status, parse_reply
from pageray.workers.transfer.handshake import HandshakeError, introduce
from pageray.workers.transfer.outgoing import OutgoingPages
from pageray.workers.transfer.page_write import PageWrite
from pageray.workers.transfer.page_writer import ShouldStop, TransferError, check_stop, never
from pageray.workers.transfer.socket_options import tune

DEFAULT_TIMEOUT_S = 30.0
_MAX_BUFFERS = 512


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
        checksums: list[int] = []
        frames = frames_of(self._outgoing, transfer_id, writes, with_checksums=self._with_checksums)
        for frame in frames:
            check_stop(should_stop, transfer_id)
            _send_frame(connection, frame)
            checksums += frame.checksums
        status, replied_id = parse_reply(_receive_reply(connection))
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
            self._connection.settimeout(self._timeout_s)
        return self._connection


def _send_frame(connection: socket.socket, frame: OutgoingFrame) -> None:
    buffers = [memoryview(frame.header), *(part.data for part in frame.payload)]
    buffers.reverse()
    while buffers:
        num_sent = connection.sendmsg(buffers[: -_MAX_BUFFERS - 1 : -1])
        while num_sent:
            first = buffers.pop()
            if num_sent < first.nbytes:
                buffers.append(first[num_sent:])
                break
            num_sent -= first.nbytes


def _receive_reply(connection: socket.socket) -> bytes:
    data = b""
    while len(data) < REPLY_BYTES:
        more = connection.recv(REPLY_BYTES - len(data))
        if not more:
            raise ConnectionError("the destination hung up")
        data += more
    return data
