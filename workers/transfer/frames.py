"""How page writes look on a byte stream (socket, gRPC): little-endian, fixed sizes.

    head     magic "PRPW", flags, number of writes, transfer id, payload bytes
    records  per write: index, destination block, layer start, layer end, checksum
    payload  the writes' bytes in wire order, one after the other

and, back from the destination to the last frame of a batch, a reply: magic "PRPA", status,
transfer id.
"""

import struct
from enum import IntEnum
from typing import NamedTuple

from pageray.cluster.ids import BlockId, TransferId
from pageray.workers.transfer.page_write import PageSpan

MAX_WRITES = 64
"""In one frame; a longer one is refused before anything of it is stored."""

_HEAD = struct.Struct("<4sHHQQ")
_RECORD = struct.Struct("<IIHHQ")
_REPLY = struct.Struct("<4sHxxQ")
_HEAD_MAGIC, _REPLY_MAGIC = b"PRPW", b"PRPA"
_WANTS_REPLY, _HAS_CHECKSUMS = 1, 2

HEAD_BYTES, RECORD_BYTES, REPLY_BYTES = _HEAD.size, _RECORD.size, _REPLY.size


class FrameError(Exception):
    """What came is not a frame of ours: the stream cannot be used any more."""


class FrameHead(NamedTuple):
    transfer_id: TransferId
    num_writes: int
    payload_bytes: int
    wants_reply: bool
    has_checksums: bool


class FrameRecords(NamedTuple):
    """By position in the frame."""

    indices: list[int]
    spans: list[PageSpan]
    checksums: list[int]


class Status(IntEnum):
    """What became of a batch."""

    COUNTED = 0
    NOT_COUNTED = 1
    """The transfer is not open at the destination, has failed there, or a write was taken over."""


def pack_frame(head: FrameHead, records: FrameRecords) -> bytes:
    """Everything before the payload. Without checksums the field is 0."""
    flags = _WANTS_REPLY * head.wants_reply | _HAS_CHECKSUMS * head.has_checksums
    packed = [_HEAD.pack(_HEAD_MAGIC, flags, head.num_writes, head.transfer_id, head.payload_bytes)]
    checksums = records.checksums if head.has_checksums else [0] * head.num_writes
    for index, span, checksum in zip(records.indices, records.spans, checksums, strict=True):
        packed.append(_RECORD.pack(index, *span, checksum))
    return b"".join(packed)


def parse_head(data: bytes) -> FrameHead:
    """Raises `FrameError` for another protocol or a frame without, or with too many, writes."""
    magic, flags, num_writes, transfer_id, payload_bytes = _HEAD.unpack(data)
    if magic != _HEAD_MAGIC or flags & ~(_WANTS_REPLY | _HAS_CHECKSUMS):
        raise FrameError(f"{magic!r} with flags {flags:#x} is not the head of a frame.")
    if not 1 <= num_writes <= MAX_WRITES:
        raise FrameError(f"a frame of {num_writes} writes; 1 to {MAX_WRITES} are allowed.")
    return FrameHead(
        TransferId(transfer_id),
        num_writes,
        payload_bytes,
        bool(flags & _WANTS_REPLY),
        bool(flags & _HAS_CHECKSUMS),
    )


def parse_records(data: bytes) -> FrameRecords:
    rows = list(_RECORD.iter_unpack(data))
    return FrameRecords(
        indices=[row[0] for row in rows],
        spans=[PageSpan(BlockId(row[1]), row[2], row[3]) for row in rows],
        checksums=[row[4] for row in rows],
    )


def pack_reply(status: Status, transfer_id: TransferId) -> bytes:
    return _REPLY.pack(_REPLY_MAGIC, status, transfer_id)


def parse_reply(data: bytes) -> tuple[Status, TransferId]:
    """Raises `FrameError` for anything else."""
    if len(data) != REPLY_BYTES:
        raise FrameError(f"a reply of {len(data)} bytes; it has {REPLY_BYTES}.")
    magic, status, transfer_id = _REPLY.unpack(data)
    if magic != _REPLY_MAGIC or status not in set(Status):
        raise FrameError(f"{magic!r} with status {status} is not a reply.")
    return Status(status), TransferId(transfer_id)
