"""Writes as data: their numbering, and how they look on a byte stream."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pageray.cluster.ids import BlockId, TransferId
from pageray.workers.transfer.frame_batches import FRAME_BYTES, cut_into_frames
from pageray.workers.transfer.frames import (
    HEAD_BYTES,
    MAX_WRITES,
    RECORD_BYTES,
    FrameError,
    FrameHead,
    FrameRecords,
    Status,
    pack_frame,
    pack_reply,
    parse_head,
    parse_records,
    parse_reply,
)
from pageray.workers.transfer.page_write import PageSpan, PageWrite, plan_spans, plan_writes
from transfer_jobs import layout_of, whole_writes

SPANS = st.builds(
    PageSpan,
    st.integers(0, 2**32 - 1).map(BlockId),
    st.integers(0, 2**16 - 1),
    st.integers(0, 2**16 - 1),
)


@given(
    st.lists(
        st.tuples(st.integers(0, 2**32 - 1), SPANS, st.integers(0, 2**64 - 1)),
        min_size=1,
        max_size=MAX_WRITES,
    ),
    st.integers(0, 2**64 - 1),
    st.booleans(),
)
def test_frame_says_what_was_packed(
    rows: list[tuple[int, PageSpan, int]], transfer_id: int, wants_reply: bool
) -> None:
    head = FrameHead(TransferId(transfer_id), len(rows), 12345, wants_reply, True)
    records = FrameRecords(*(list(column) for column in zip(*rows, strict=True)))  # pyright: ignore[reportArgumentType]
    data = pack_frame(head, records)
    assert len(data) == HEAD_BYTES + len(rows) * RECORD_BYTES
    assert parse_head(data[:HEAD_BYTES]) == head
    assert parse_records(data[HEAD_BYTES:]) == records


def test_replies() -> None:
    for status in Status:
        assert parse_reply(pack_reply(status, TransferId(9))) == (status, 9)
    for data in (b"", bytes(16), pack_reply(Status.COUNTED, TransferId(9))[:-1]):
        with pytest.raises(FrameError):
            parse_reply(data)


def test_both_sides_number_writes_alike() -> None:
    sources, destinations = [BlockId(8), BlockId(9)], [BlockId(1), BlockId(2)]
    for ranges in (None, [(0, 1), (1, 3)]):
        writes = plan_writes(sources, destinations, ranges)
        spans = plan_spans(destinations, 3, ranges)
        assert [write.index for write in writes] == list(range(len(spans)))
        assert [write.destination_span(3) for write in writes] == spans
    with pytest.raises(ValueError, match="2 source blocks for 1 destination blocks"):
        plan_writes(sources, destinations[:1])


def test_write_travels_as_data() -> None:
    for write in (PageWrite(3, BlockId(4), BlockId(5)), PageWrite(0, BlockId(1), BlockId(2), 1, 2)):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(write), type=PageWrite) == write


@pytest.mark.parametrize(
    ("block_size", "writes_per_frame"), [(4, MAX_WRITES), (1024, 7), (65_536, 1)]
)
def test_frames_are_bounded_in_writes_and_bytes(block_size: int, writes_per_frame: int) -> None:
    layout = layout_of(2, block_size)
    writes = whole_writes([(1, block) for block in range(1, 3 * writes_per_frame + 1)])
    batches = cut_into_frames(layout, writes)
    assert [write for batch in batches for write in batch] == writes
    assert [len(batch) for batch in batches] == [writes_per_frame] * 3
    page_bytes = sum(layout.page_bytes(rank) for rank in range(2))
    assert writes_per_frame == 1 or writes_per_frame * page_bytes <= FRAME_BYTES
