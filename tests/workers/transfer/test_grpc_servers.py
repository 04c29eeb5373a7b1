"""The page stream on the integrator's gRPC server, whichever kind that is."""

import asyncio
from concurrent import futures

import grpc
import grpc.aio
import pytest

from pageray.cluster.ids import TransferId
from pageray.workers.transfer.arrivals import Arrivals
from pageray.workers.transfer.grpc_stream import add_page_stream
from pageray.workers.transfer.grpc_writer import GrpcStreamWriter
from pageray.workers.transfer.outgoing import OutgoingPages
from pageray.workers.transfer.page_write import PageWrite
from pageray.workers.transfer.page_writer import TransferError
from transfer_jobs import (
    SECRET,
    TIMEOUT_S,
    SharedPools,
    assert_delivered,
    fill_with_pattern,
    layout_of,
    whole_writes,
)

ID = TransferId(1)
WRITES = whole_writes([(1, 2), (3, 4)])


def test_on_an_asyncio_server() -> None:
    ours, theirs = SharedPools(layout_of(3)), SharedPools(layout_of(2))
    fill_with_pattern(ours.pages)
    arrivals = Arrivals(theirs.pages)
    expectation = arrivals.expect(ID, [write.destination_block for write in WRITES])

    def write(port: int, writes: list[PageWrite]) -> list[int]:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            outgoing = OutgoingPages(ours.pages, theirs.layout)
            return GrpcStreamWriter(outgoing, channel, SECRET).write(ID, writes)

    async def serve() -> list[int]:
        server = grpc.aio.server(migration_thread_pool=futures.ThreadPoolExecutor(2))
        add_page_stream(server, arrivals, SECRET)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            checksums = await asyncio.to_thread(write, port, WRITES)
            # Refusals get through that kind of server too.
            intruder = PageWrite(0, WRITES[0].source_block, WRITES[1].destination_block)
            with pytest.raises(TransferError, match="INVALID_ARGUMENT"):
                await asyncio.to_thread(write, port, [intruder])
        finally:
            await server.stop(None)
        return checksums

    assert len(asyncio.run(serve())) == 2
    assert expectation.wait(TIMEOUT_S)
    assert_delivered(theirs.pages, WRITES)
    ours.close()
    theirs.close()


def test_server_without_a_secret_is_refused() -> None:
    pools = SharedPools(layout_of(1))
    with pytest.raises(ValueError, match="needs a secret"):
        add_page_stream(grpc.server(futures.ThreadPoolExecutor(1)), Arrivals(pools.pages), b"")
    pools.close()
