"""Source end of a byte stream of frames: writes cut into frames, ready to be sent."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pageray.cluster.ids import TransferId
from pageray.workers.transfer.checksum import checksum_of
from pageray.workers.transfer.frames import MAX_WRITES, FrameHead, FrameRecords, pack_frame
from pageray.workers.transfer.mapped_pages import ByteArray
from pageray.workers.transfer.outgoing import OutgoingPages
from pageray.workers.transfer.page_write import PageWrite

FRAME_BYTES = 1 << 20
"""A frame ends before its payload exceeds this, but holds at least one write."""


class OutgoingFrame(NamedTuple):
    """`payload` may lie in staging memory that the next frame uses again."""

    header: bytes
    payload: list[ByteArray]
    checksums: list[int]


def frames_of(
    outgoing: OutgoingPages,
    transfer_id: TransferId,
    writes: Sequence[PageWrite],
    *,
    with_checksums: bool,
) -> Iterator[OutgoingFrame]:
    """The frames that carry `writes`, in order; the last one asks for a reply."""
    batches = _cut(outgoing, writes)
    for number, batch in enumerate(batches, start=1):
        parts = [outgoing.parts(write, place) for place, write in enumerate(batch)]
        checksums = [checksum_of(part) for part in parts] if with_checksums else []
        num_layers = outgoing.destination.num_layers
        records = FrameRecords(
            indices=[write.index for write in batch],
            spans=[write.destination_span(num_layers) for write in batch],
            checksums=checksums,
        )
        head = FrameHead(
            transfer_id=transfer_id,
            num_writes=len(batch),
            payload_bytes=sum(outgoing.write_bytes(write) for write in batch),
            wants_reply=number == len(batches),
            has_checksums=with_checksums,
        )
        payload = [array for part in parts for array in part]
        yield OutgoingFrame(pack_frame(head, records), payload, checksums)


def _cut(outgoing: OutgoingPages, writes: Sequence[PageWrite]) -> list[list[PageWrite]]:
    batches: list[list[PageWrite]] = []
    num_bytes = 0
    for write in writes:
        size = outgoing.write_bytes(write)
        if not batches or num_bytes + size > FRAME_BYTES or len(batches[-1]) == MAX_WRITES:
            batches.append([])
            num_bytes = 0
        batches[-1].append(write)
        num_bytes += size
    return batches
