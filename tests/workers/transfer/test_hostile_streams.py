"""What a byte stream may bring: damaged, oversized, cut and late frames, strangers."""

import logging
import socket
import time
from collections.abc import Callable, Iterator
from typing import cast

import grpc
import pytest

from pageray.cluster.ids import BlockId, TransferId
from pageray.workers.transfer.frames import (
    MAX_WRITES,
    REPLY_BYTES,
    FrameHead,
    FrameRecords,
    Status,
    pack_frame,
    parse_reply,
)
from pageray.workers.transfer.grpc_stream import METHOD, SECRET_KEY, SERVICE
from pageray.workers.transfer.handshake import introduce
from pageray.workers.transfer.page_write import PageSpan
from pageray.workers.transfer.socket_server import PageSocketServer
from transfer_jobs import (
    NUM_LAYERS,
    SECRET,
    TIMEOUT_S,
    UNTOUCHED,
    Destination,
    assert_delivered,
    layout_of,
    whole_writes,
)

MakeDestination = Callable[..., Destination]
ID = TransferId(5)
SPAN = PageSpan(BlockId(5), 0, NUM_LAYERS)
PAGE_BYTES = layout_of(1).page_bytes(0)


def frame(
    *,
    payload_bytes: int = PAGE_BYTES,
    num_writes: int = 1,
    has_checksums: bool = True,
    checksum: int = 1,
) -> bytes:
    """A frame for `SPAN`, without its payload."""
    head = FrameHead(ID, num_writes, payload_bytes, True, has_checksums)
    records = FrameRecords([0] * num_writes, [SPAN] * num_writes, [checksum] * num_writes)
    return pack_frame(head, records)


def connect(destination: Destination) -> socket.socket:
    host, _, port = destination.endpoint().address.rpartition(":")
    connection = socket.create_connection((host, int(port)), TIMEOUT_S)
    introduce(connection, SECRET, TIMEOUT_S)
    connection.settimeout(TIMEOUT_S)
    return connection


def exchange_socket(destination: Destination, data: bytes) -> bytes:
    """The reply, or b"" when the destination hangs up."""
    with connect(destination) as connection:
        connection.sendall(data)
        try:
            return connection.recv(REPLY_BYTES)
        except ConnectionResetError:
            return b""


def exchange_grpc(destination: Destination, data: bytes) -> bytes:
    def messages() -> Iterator[bytes]:
        for start in range(0, len(data), 777):
            yield data[start : start + 777]

    with grpc.insecure_channel(destination.endpoint().address) as channel:
        try:
            call = cast("Callable[..., bytes]", channel.stream_unary(f"/{SERVICE}/{METHOD}"))
            return call(messages(), timeout=TIMEOUT_S, metadata=((SECRET_KEY, SECRET),))
        except grpc.RpcError:
            return b""


EXCHANGES = pytest.mark.parametrize(
    ("transport", "exchange"), [("sockets", exchange_socket), ("grpc", exchange_grpc)]
)
Exchange = Callable[[Destination, bytes], bytes]


@EXCHANGES
def test_damaged_page_fails_the_transfer(
    make_destination: MakeDestination, transport: str, exchange: Exchange
) -> None:
    destination = make_destination(transport, layout_of(1))
    expectation = destination.expect(ID, whole_writes([(1, 5)]))
    reply = exchange(destination, frame(checksum=1) + bytes(PAGE_BYTES))
    assert parse_reply(reply) == (Status.NOT_COUNTED, ID)
    assert not expectation.wait(TIMEOUT_S)
    assert expectation.failure == "the checksum of write 0 is wrong."


@EXCHANGES
@pytest.mark.parametrize(
    "refused",
    [
        (frame(payload_bytes=PAGE_BYTES + 1), f"payload of {PAGE_BYTES + 1} bytes"),
        (frame(payload_bytes=2**63), "payload of"),
        (frame(num_writes=MAX_WRITES + 1), f"a frame of {MAX_WRITES + 1} writes"),
        (frame(has_checksums=False), "without checksums"),
        (b"GET / HTTP/1.1\r\nHost: pages\r\n\r\n", "is not the head of a frame"),
    ],
)
def test_refused_before_a_byte_is_written(
    make_destination: MakeDestination,
    caplog: pytest.LogCaptureFixture,
    transport: str,
    exchange: Exchange,
    refused: tuple[bytes, str],
) -> None:
    data, reason = refused
    destination = make_destination(transport, layout_of(1))
    expectation = destination.expect(ID, whole_writes([(1, 5)]))
    with caplog.at_level(logging.WARNING):
        assert exchange(destination, data + bytes(PAGE_BYTES)) == b""
        destination.close_transport()
    assert reason in caplog.text
    assert not expectation.outcome.done()
    assert_delivered(destination.pages, [])


def test_frame_that_is_late_by_half_writes_nothing_more(
    make_destination: MakeDestination,
) -> None:
    """The pages are given to somebody else while their old source is in the middle of one."""
    destination = make_destination("sockets", layout_of(1))
    expectation = destination.expect(ID, whole_writes([(1, 5)]))
    page = destination.pages.parts(SPAN)[0]
    half = PAGE_BYTES // 2
    with connect(destination) as connection:
        connection.sendall(frame() + bytes(half))
        wait_until(lambda: not page[:half].any())
        destination.arrivals.close(ID)
        page[:] = UNTOUCHED
        connection.sendall(bytes(PAGE_BYTES - half))
        assert parse_reply(connection.recv(REPLY_BYTES)) == (Status.NOT_COUNTED, ID)
    assert not expectation.wait(0.0)
    assert_delivered(destination.pages, [])


def test_half_a_frame_and_gone(make_destination: MakeDestination) -> None:
    destination = make_destination("sockets", layout_of(1))
    expectation = destination.expect(ID, whole_writes([(1, 5)]))
    with connect(destination) as connection:
        connection.sendall(frame() + bytes(10))
    assert not expectation.wait(0.05)
    destination.arrivals.close(ID)


def test_stranger_gets_nothing_but_a_hang_up(make_destination: MakeDestination) -> None:
    destination = make_destination("sockets", layout_of(1))
    destination.expect(ID, whole_writes([(1, 5)]))
    host, _, port = destination.endpoint().address.rpartition(":")
    with socket.create_connection((host, int(port)), TIMEOUT_S) as connection:
        connection.sendall(bytes(64) + frame() + bytes(PAGE_BYTES))
        received = b""
        try:
            while more := connection.recv(4096):
                received += more
        except ConnectionResetError:
            pass
    assert len(received) <= 40, "more than the greeting"
    assert_delivered(destination.pages, [])


def test_connections_are_bounded() -> None:
    destination = Destination("none", layout_of(1))
    server = PageSocketServer(destination.arrivals, SECRET, max_connections=1)
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), TIMEOUT_S) as first:
        introduce(first, SECRET, TIMEOUT_S)
        with socket.create_connection((host, int(port)), TIMEOUT_S) as second:
            assert second.recv(1) == b""
    server.close()
    server.close()
    destination.close()


def test_server_closes_while_a_source_is_silent(make_destination: MakeDestination) -> None:
    destination = make_destination("sockets", layout_of(1))
    with connect(destination) as connection:
        connection.sendall(frame()[:9])
        destination.close_transport()
        assert connection.recv(1) == b""


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not is_true():
        assert time.monotonic() < deadline_s, "it did not happen"
