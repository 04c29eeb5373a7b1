"""Source end of a byte stream of frames: writes cut into frames, ready to be sent."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pageray.cluster.ids import TransferId
from pageray.cluster.page_layout import PoolLayout
from pageray.workers.transfer.checksum import checksum_of
from pageray.workers.transfer.frames import MAX_WRITES, FrameHead, FrameRecords, pack_frame
from pageray.workers.transfer.mapped_pages import ByteArray, wire_bytes
from pageray.workers.transfer.outgoing import OutgoingPages
from pageray.workers.transfer.page_write import PageWrite

FRAME_BYTES = 2 << 20
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
    batches = cut_into_frames(outgoing.destination, writes)
    for number, batch in enumerate(batches, start=1):
        parts = [outgoing.parts(write, place) for place, write in enumerate(batch)]
        checksums = [checksum_of(part) for part in parts] if with_checksums else None
        header = header_of(
            outgoing.destination,
            transfer_id,
            batch,
            checksums,
            wants_reply=number == len(batches),
        )
        yield OutgoingFrame(header, [array for part in parts for array in part], checksums or [])


def cut_into_frames(
    layout: PoolLayout, writes: Sequence[PageWrite], max_writes: int = MAX_WRITES
) -> list[Sequence[PageWrite]]:
    """`writes` in order, by frame. `layout`: the destination's."""
    batches: list[list[PageWrite]] = []
    num_bytes = 0
    for write in writes:
        size = wire_bytes(layout, write.destination_span(layout.num_layers))
        if not batches or num_bytes + size > FRAME_BYTES or len(batches[-1]) == max_writes:
            batches.append([])
            num_bytes = 0
        batches[-1].append(write)
        num_bytes += size
    return list(batches)


def header_of(
    layout: PoolLayout,
    transfer_id: TransferId,
    batch: Sequence[PageWrite],
    checksums: list[int] | None,
    *,
    wants_reply: bool,
) -> bytes:
    """Head and records of the frame that carries `batch`. None: without checksums."""
    spans = [write.destination_span(layout.num_layers) for write in batch]
    head = FrameHead(
        transfer_id=transfer_id,
        num_writes=len(batch),
        payload_bytes=sum(wire_bytes(layout, span) for span in spans),
        wants_reply=wants_reply,
        has_checksums=checksums is not None,
    )
    return pack_frame(head, FrameRecords([write.index for write in batch], spans, checksums or []))
