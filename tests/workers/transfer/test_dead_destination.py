"""A source whose destination dies gets a `TransferError`, soon."""

import itertools
import os
import signal
import socket
import threading
from concurrent import futures

import grpc
import pytest

from pageray.cluster.ids import TransferId
from pageray.workers.transfer.arrivals import Arrivals
from pageray.workers.transfer.grpc_stream import add_page_stream
from pageray.workers.transfer.grpc_writer import GrpcStreamWriter
from pageray.workers.transfer.handshake import welcome
from pageray.workers.transfer.mapped_pages import MappedPages
from pageray.workers.transfer.outgoing import OutgoingPages
from pageray.workers.transfer.page_writer import (
    ShouldStop,
    TransferError,
    TransferStoppedError,
)
from pageray.workers.transfer.shared_memory import SharedMemoryWriter
from pageray.workers.transfer.socket_writer import SocketWriter
from transfer_jobs import (
    NUM_BLOCKS,
    SECRET,
    Destination,
    SharedPools,
    Source,
    layout_of,
    whole_writes,
)

ID = TransferId(1)
WRITES = whole_writes([(block, block) for block in range(1, NUM_BLOCKS + 1)])


def test_shared_memory_stops_when_the_process_is_gone() -> None:
    ours, theirs = SharedPools(layout_of(1)), SharedPools(layout_of(1))
    peer = Source()
    mapped = MappedPages.open(theirs.layout, theirs.paths)
    writer = SharedMemoryWriter(ours.pages, mapped, peer.pid)
    assert len(writer.write(ID, WRITES)) == NUM_BLOCKS
    os.kill(peer.pid, signal.SIGKILL)
    peer.process.join()
    with pytest.raises(TransferError, match="the destination has ended"):
        writer.write(ID, WRITES)
    writer.close()
    peer.close()
    ours.close()
    theirs.close()


def test_socket_server_that_is_gone() -> None:
    ours, destination = SharedPools(layout_of(1)), Destination("sockets", layout_of(1))
    outgoing = OutgoingPages(ours.pages, destination.pages.layout)
    writer = SocketWriter(outgoing, destination.endpoint().address, SECRET)
    destination.expect(ID, WRITES)
    assert len(writer.write(ID, WRITES)) == NUM_BLOCKS
    destination.close()
    for _ in range(2):  # on the old connection, and then at connecting
        with pytest.raises(TransferError, match=f"transfer {ID} to 127.0.0.1"):
            writer.write(ID, WRITES)
    writer.close()
    ours.close()


def test_grpc_server_that_is_gone() -> None:
    ours, destination = SharedPools(layout_of(1)), Destination("grpc", layout_of(1))
    with grpc.insecure_channel(destination.endpoint().address) as channel:
        writer = GrpcStreamWriter(
            OutgoingPages(ours.pages, destination.pages.layout), channel, SECRET
        )
        destination.expect(ID, WRITES)
        assert len(writer.write(ID, WRITES)) == NUM_BLOCKS
        destination.close()
        with pytest.raises(TransferError, match=f"transfer {ID} over gRPC"):
            writer.write(ID, WRITES)
    ours.close()


def test_grpc_server_that_takes_nothing() -> None:
    ours, theirs = SharedPools(layout_of(1)), SharedPools(layout_of(1))
    server = grpc.server(futures.ThreadPoolExecutor(1))
    add_page_stream(server, Arrivals(theirs.pages), SECRET)
    # Not started: connections are accepted by the kernel only.
    port = server.add_insecure_port("127.0.0.1:0")
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        outgoing = OutgoingPages(ours.pages, theirs.layout)
        with pytest.raises(TransferError, match="over gRPC"):
            GrpcStreamWriter(outgoing, channel, SECRET, timeout_s=0.3).write(ID, WRITES)
        with pytest.raises(TransferStoppedError):
            GrpcStreamWriter(outgoing, channel, SECRET).write(ID, WRITES, stop_at_third_look())
    ours.close()
    theirs.close()


def test_socket_server_that_takes_nothing() -> None:
    layout = layout_of(1, block_size=65_536)  # more than the kernel's buffers hold
    ours, destination = SharedPools(layout), SharedPools(layout, num_blocks=2)
    outgoing = OutgoingPages(ours.pages, destination.layout)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        accepted: list[socket.socket] = []

        def greet() -> None:
            for _ in range(2):
                connection, _ = listener.accept()
                accepted.append(connection)
                welcome(connection, SECRET, 10.0)

        greeter = threading.Thread(target=greet)
        greeter.start()
        with pytest.raises(TransferError, match="timed out"):
            SocketWriter(outgoing, address, SECRET, timeout_s=0.3).write(ID, WRITES)
        with pytest.raises(TransferStoppedError):
            SocketWriter(outgoing, address, SECRET).write(ID, WRITES, stop_at_third_look())
        greeter.join(10)
        for connection in accepted:
            connection.close()
    ours.close()
    destination.close()


def stop_at_third_look() -> ShouldStop:
    looks = itertools.count(1)
    return lambda: next(looks) >= 3
