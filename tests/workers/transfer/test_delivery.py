"""What holds for every transport, between two processes."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from pageray.cluster.ids import BlockId, TransferId
from pageray.workers.transfer.page_write import PageWrite, plan_writes
from pageray.workers.transfer.page_writer import TransferError
from transfer_jobs import (
    NUM_BLOCKS,
    NUM_LAYERS,
    TIMEOUT_S,
    TRANSPORTS,
    Destination,
    Source,
    WriteJob,
    assert_delivered,
    layout_of,
    whole_writes,
)

MakeDestination = Callable[..., Destination]
ID = TransferId(7)
LARGE_PAGES = layout_of(1, block_size=4096)
"""More than a frame each."""
PAIRS = [(3, 5), (1, 2), (12, 12), (4, 1)]


def send(
    source: Source, destination: Destination, writes: list[PageWrite], source_tp: int = 1
) -> list[int]:
    """Write and let the destination hear of it."""
    checksums = source.write(job_for(destination, writes, source_tp))
    destination.acknowledge(ID, writes, checksums)
    return checksums


def job_for(destination: Destination, writes: list[PageWrite], source_tp: int = 1) -> WriteJob:
    return WriteJob(
        endpoint=destination.endpoint(),
        source_layout=layout_of(source_tp),
        transfer_id=ID,
        writes=writes,
    )


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("source_tp", "destination_tp"), [(1, 1), (2, 1), (1, 2), (3, 2), (4, 4)])
def test_delivers_exactly_the_bytes(
    source: Source,
    make_destination: MakeDestination,
    transport: str,
    source_tp: int,
    destination_tp: int,
) -> None:
    destination = make_destination(transport, layout_of(destination_tp))
    writes = whole_writes(PAIRS)
    expectation = destination.expect(ID, writes)
    checksums = send(source, destination, writes, source_tp)
    assert len(set(checksums)) == len(writes)
    assert expectation.wait(TIMEOUT_S)
    assert expectation.num_counted == len(writes)
    assert_delivered(destination.pages, writes)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_layer_by_layer_in_several_calls(
    source: Source, make_destination: MakeDestination, transport: str
) -> None:
    destination = make_destination(transport, layout_of(2))
    writes = plan_writes(
        [BlockId(2), BlockId(9)], [BlockId(4), BlockId(3)], [(0, 1), (1, NUM_LAYERS)]
    )
    expectation = destination.expect(ID, writes)
    send(source, destination, writes[:2], source_tp=3)
    assert not expectation.outcome.done(), expectation.failure
    assert_delivered(destination.pages, writes[:2])
    send(source, destination, writes[2:], source_tp=3)
    assert expectation.wait(TIMEOUT_S)
    assert_delivered(destination.pages, writes)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_repeated_and_reordered_writes_count_once(
    source: Source, make_destination: MakeDestination, transport: str
) -> None:
    destination = make_destination(transport, layout_of(1))
    writes = whole_writes(PAIRS)
    expectation = destination.expect(ID, writes)
    send(source, destination, [writes[2], writes[0], writes[2]])
    send(source, destination, [writes[0], writes[1]])
    assert expectation.num_counted == 3
    assert not expectation.outcome.done()
    send(source, destination, [writes[3], writes[1]])
    assert expectation.wait(TIMEOUT_S)
    assert expectation.num_counted == 4
    assert_delivered(destination.pages, writes)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_without_checksums(
    source: Source, make_destination: MakeDestination, transport: str
) -> None:
    destination = make_destination(transport, layout_of(1), with_checksums=False)
    writes = whole_writes(PAIRS)
    expectation = destination.expect(ID, writes)
    assert send(source, destination, writes) == []
    assert expectation.wait(TIMEOUT_S)
    assert_delivered(destination.pages, writes)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_stopped_write_ends_between_pages(
    source: Source, make_destination: MakeDestination, transport: str
) -> None:
    destination = make_destination(transport, LARGE_PAGES)
    writes = whole_writes([(block, block) for block in range(1, NUM_BLOCKS + 1)])
    expectation = destination.expect(ID, writes)
    job = WriteJob(
        endpoint=destination.endpoint(),
        source_layout=LARGE_PAGES,
        transfer_id=ID,
        writes=writes,
        stop_after=4,
    )
    with pytest.raises(TransferError, match="TransferStoppedError"):
        source.write(job)
    assert not expectation.outcome.done()
    # The writer is as good as new.
    checksums = source.write(replace(job, stop_after=None))
    destination.acknowledge(ID, writes, checksums)
    assert expectation.wait(TIMEOUT_S)
    assert_delivered(destination.pages, writes)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_killed_source_leaves_no_hang(make_destination: MakeDestination, transport: str) -> None:
    destination = make_destination(transport, LARGE_PAGES)
    writes = whole_writes([(block, block) for block in range(1, NUM_BLOCKS + 1)])
    expectation = destination.expect(ID, writes)
    mortal = Source()
    job = WriteJob(
        endpoint=destination.endpoint(),
        source_layout=LARGE_PAGES,
        transfer_id=ID,
        writes=writes,
        announce_after=4,
    )
    mortal.start(job)
    assert mortal.receive() == "busy"
    mortal.close()
    assert not expectation.wait(0.2)
    destination.arrivals.close(ID)
    assert not expectation.wait(TIMEOUT_S)
    assert expectation.num_counted < NUM_BLOCKS


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_block_that_the_source_has_not_is_an_error_before_anything_is_sent(
    source: Source, make_destination: MakeDestination, transport: str
) -> None:
    destination = make_destination(transport, layout_of(1))
    writes = whole_writes([(1, 2), (NUM_BLOCKS + 1, 3)])
    expectation = destination.expect(ID, writes)
    with pytest.raises(TransferError, match=f"ValueError: block {NUM_BLOCKS + 1} is not one of"):
        source.write(job_for(destination, writes))
    assert expectation.num_counted == 0
    assert_delivered(destination.pages, [])


@pytest.mark.parametrize("transport", ["sockets", "grpc"])
def test_late_frames_of_a_closed_transfer_write_nothing(
    source: Source, make_destination: MakeDestination, transport: str
) -> None:
    destination = make_destination(transport, layout_of(2))
    writes = whole_writes(PAIRS)
    expectation = destination.expect(ID, writes)
    destination.arrivals.close(ID)
    for _ in range(2):
        with pytest.raises(TransferError, match="NOT_COUNTED"):
            source.write(job_for(destination, writes))
    assert not expectation.wait(0.0)
    assert_delivered(destination.pages, [])


@pytest.mark.parametrize("transport", ["sockets", "grpc"])
def test_wrong_secret_is_refused(
    source: Source, make_destination: MakeDestination, transport: str
) -> None:
    destination = make_destination(transport, layout_of(1))
    writes = whole_writes(PAIRS)
    destination.expect(ID, writes)
    job = WriteJob(
        endpoint=destination.endpoint(secret=b"guessed"),
        source_layout=layout_of(1),
        transfer_id=ID,
        writes=writes,
    )
    with pytest.raises(TransferError, match="secret"):
        source.write(job)
    assert_delivered(destination.pages, [])


@pytest.mark.parametrize("transport", ["sockets", "grpc"])
def test_block_that_was_not_asked_for_is_refused(
    source: Source, make_destination: MakeDestination, transport: str
) -> None:
    destination = make_destination(transport, layout_of(1))
    destination.expect(ID, whole_writes(PAIRS))
    for intruder in (
        PageWrite(0, BlockId(1), BlockId(6)),
        PageWrite(0, BlockId(1), BlockId(0)),
        PageWrite(0, BlockId(1), BlockId(NUM_BLOCKS + 1)),
        PageWrite(0, BlockId(1), BlockId(5), 0, 1),
        PageWrite(99, BlockId(1), BlockId(5)),
    ):
        with pytest.raises(TransferError):
            source.write(job_for(destination, [intruder]))
    assert_delivered(destination.pages, [])
