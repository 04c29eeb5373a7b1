"""Destination end of a byte stream of frames, whatever carries the bytes."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from pageray.cluster.ids import TransferId
from pageray.workers.transfer.arrivals import Arrivals
from pageray.workers.transfer.frames import (
    HEAD_BYTES,
    RECORD_BYTES,
    FrameError,
    FrameHead,
    FrameRecords,
    Status,
    parse_head,
    parse_records,
)
from pageray.workers.transfer.landing import Landing
from pageray.workers.transfer.mapped_pages import ByteArray, check_span, wire_bytes

_SCRATCH_BYTES = 1 << 20
_MAX_PIECES = 64
"""Handed to `take` at once."""


class StreamEndedError(Exception):
    """The peer is gone, or was silent for too long in the middle of a frame."""


class ByteStream(Protocol):
    """Bytes from the peer, in order."""

    def take(self, targets: Sequence[ByteArray]) -> int:
        """Fill `targets` with what is there, without waiting; returns how many bytes."""
        ...

    def wait(self) -> None:
        """Until there are bytes to take. Raises `StreamEndedError` when none will come."""
        ...


def check_frame(arrivals: Arrivals, head: FrameHead, records: FrameRecords) -> None:
    """Raises `FrameError` unless every write of the frame lies in the pools, all its bytes are
    there, and checksums are if `arrivals` asks for them."""
    pages = arrivals.pages
    if arrivals.with_checksums and not head.has_checksums:
        raise FrameError("a frame without checksums; this engine asks for them.")
    for span in records.spans:
        try:
            check_span(pages, span)
        except ValueError as error:
            raise FrameError(f"a frame for {span}: {error}") from error
    expected_bytes = sum(wire_bytes(pages.layout, span) for span in records.spans)
    if head.payload_bytes != expected_bytes:
        raise FrameError(
            f"a payload of {head.payload_bytes} bytes for pages of {expected_bytes} bytes."
        )


class FrameReceiver:
    """Puts the payload of frames straight into the pages that expect it."""

    def __init__(self, arrivals: Arrivals, stream: ByteStream) -> None:
        self._arrivals = arrivals
        self._stream = stream
        self._scratch = np.empty(_SCRATCH_BYTES, np.uint8)
        self._status = Status.COUNTED

    def receive(self) -> tuple[Status, TransferId] | None:
        """Take one frame; the reply to send, if the source wants one: the status of all frames
        since the last reply.

        Raises `FrameError` and `UnexpectedWriteError` when the source must not be listened to any
        more: nothing of that frame has been written.
        """
        head = parse_head(self._read(HEAD_BYTES))
        records = parse_records(self._read(head.num_writes * RECORD_BYTES))
        check_frame(self._arrivals, head, records)
        landing = self._arrivals.begin(head.transfer_id, records.indices, records.spans)
        if landing is None or not self._land(landing, head, records):
            self._status = Status.NOT_COUNTED
        if landing is None:
            self._discard(head.payload_bytes)
        if not head.wants_reply:
            return None
        status, self._status = self._status, Status.COUNTED
        return status, head.transfer_id

    def _land(self, landing: Landing, head: FrameHead, records: FrameRecords) -> bool:
        """Receive a payload; whether all its writes have been counted."""
        pieces: list[ByteArray] = []
        for target, span in zip(landing.targets(), records.spans, strict=True):
            pieces += (
                self._nowhere(wire_bytes(self._arrivals.pages.layout, span))
                if target is None
                else target
            )
        num_left = head.payload_bytes - self._fill(landing, pieces)
        if num_left:
            self._discard(num_left)
            return False
        return landing.finish(records.checksums if self._arrivals.with_checksums else None)

    def _fill(self, landing: Landing, pieces: list[ByteArray]) -> int:
        """Fill `pieces` as long as it is permitted; returns the number of bytes taken."""
        num_taken = 0
        pieces = pieces[::-1]
        while pieces:
            with landing.permit() as is_granted:
                if not is_granted:
                    break
                count = self._stream.take(pieces[: -_MAX_PIECES - 1 : -1])
            if count == 0:
                self._stream.wait()
            num_taken += count
            _drop_filled(pieces, count)
        return num_taken

    def _nowhere(self, num_bytes: int) -> list[ByteArray]:
        whole, rest = divmod(num_bytes, _SCRATCH_BYTES)
        return [self._scratch] * whole + ([self._scratch[:rest]] if rest else [])

    def _discard(self, num_bytes: int) -> None:
        while num_bytes:
            count = self._stream.take([self._scratch[:num_bytes]])
            if count == 0:
                self._stream.wait()
            num_bytes -= count

    def _read(self, num_bytes: int) -> bytes:
        buffer = np.empty(num_bytes, np.uint8)
        num_read = 0
        while num_read < num_bytes:
            count = self._stream.take([buffer[num_read:]])
            if count == 0:
                self._stream.wait()
            num_read += count
        return buffer.tobytes()


def _drop_filled(pieces: list[ByteArray], num_bytes: int) -> None:
    """Cut the first `num_bytes` off `pieces`, whose first element stands at the end."""
    while num_bytes:
        piece = pieces[-1]
        if num_bytes < piece.nbytes:
            pieces[-1] = piece[num_bytes:]
            return
        num_bytes -= piece.nbytes
        pieces.pop()
