"""A source whose destination dies gets a `TransferError`, soon."""

import os
import signal
from concurrent import futures

import grpc
import pytest

from pageray.cluster.ids import TransferId
from pageray.workers.transfer.grpc_stream import add_page_stream
from pageray.workers.transfer.grpc_writer import GrpcStreamWriter
from pageray.workers.transfer.mapped_pages import MappedPages
from pageray.workers.transfer.outgoing import OutgoingPages
from pageray.workers.transfer.page_writer import TransferError
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


def test_destination_that_takes_nothing_is_given_up_on() -> None:
    """A gRPC handler that never gets a turn: the deadline ends the write."""
    ours, destination = SharedPools(layout_of(1)), Destination("none", layout_of(1))
    server = grpc.server(futures.ThreadPoolExecutor(1), maximum_concurrent_rpcs=None)
    add_page_stream(server, destination.arrivals, SECRET)
    port = server.add_insecure_port("127.0.0.1:0")
    # Not started: connections are accepted by the kernel only.
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        outgoing = OutgoingPages(ours.pages, destination.pages.layout)
        writer = GrpcStreamWriter(outgoing, channel, SECRET, timeout_s=0.2)
        with pytest.raises(TransferError):
            writer.write(ID, WRITES)
    destination.close()
    ours.close()
