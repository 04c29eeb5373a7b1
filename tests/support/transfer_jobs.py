"""Page transfers between two processes: the test is the destination, a spawned one the source."""

import importlib.util
import itertools
import multiprocessing
import os
import tempfile
import threading
from collections.abc import Sequence
from concurrent import futures
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import cast

import grpc
import numpy as np
import pytest

from pageray.cluster.head_partition import partition_heads
from pageray.cluster.ids import BlockId, TransferId
from pageray.cluster.page_layout import PoolLayout
from pageray.workers.transfer.arrivals import Arrivals, Expectation
from pageray.workers.transfer.grpc_stream import add_page_stream
from pageray.workers.transfer.grpc_writer import GrpcStreamWriter
from pageray.workers.transfer.mapped_pages import ByteArray, MappedPages
from pageray.workers.transfer.nixl_pools import NixlEndpoint, NixlPools
from pageray.workers.transfer.nixl_writer import NixlWriter
from pageray.workers.transfer.outgoing import OutgoingPages
from pageray.workers.transfer.page_write import PageSpan, PageWrite
from pageray.workers.transfer.page_writer import PageWriter, TransferError
from pageray.workers.transfer.shared_memory import SharedMemoryWriter
from pageray.workers.transfer.socket_server import PageSocketServer
from pageray.workers.transfer.socket_writer import SocketWriter

SECRET = b"the secret of this application"
UNTOUCHED = 0xAB
NUM_BLOCKS = 12
NUM_LAYERS = 3
TIMEOUT_S = 20.0


def layout_of(tp_size: int, block_size: int = 4, num_layers: int = NUM_LAYERS) -> PoolLayout:
    """3 KV heads over `tp_size` ranks."""
    shards = partition_heads(9, 3, tp_size)
    return PoolLayout(
        num_layers=num_layers,
        block_size=block_size,
        head_dim=8,
        element_bytes=2,
        shards=tuple((shard.kv_start, shard.kv_end) for shard in shards),
    )


class SharedPools:
    """Pools that another process can map, every byte `UNTOUCHED`."""

    def __init__(self, layout: PoolLayout, num_blocks: int = NUM_BLOCKS) -> None:
        self.layout = layout
        self._memfds: list[int] = []
        for rank in range(len(layout.shards)):
            memfd = os.memfd_create("pageray-test-pool", os.MFD_CLOEXEC)
            os.ftruncate(memfd, (num_blocks + 1) * layout.page_bytes(rank))
            self._memfds.append(memfd)
        self.pages = MappedPages.open(layout, self.paths)
        for rank in range(len(layout.shards)):
            self.pages.rank(rank)[:] = UNTOUCHED

    @property
    def paths(self) -> list[str]:
        return [f"/proc/{os.getpid()}/fd/{memfd}" for memfd in self._memfds]

    def close(self) -> None:
        self.pages.close()
        for memfd in self._memfds:
            os.close(memfd)


def pattern(layout: PoolLayout, rank: int, num_blocks: int) -> ByteArray:
    """What the source holds: depends on block, layer, K or V, head of the model and offset."""
    start, end = layout.shards[rank]
    block, layer, kv, head, offset = np.ix_(
        np.arange(num_blocks + 1) * 29,
        np.arange(layout.num_layers) * 17,
        np.arange(2) * 101,
        np.arange(start, end) * 131,
        np.arange(layout.head_bytes) * 7,
    )
    return ((block + layer + kv + head + offset) % 251 % UNTOUCHED).astype(np.uint8)


def fill_with_pattern(pages: MappedPages) -> None:
    for rank in range(len(pages.layout.shards)):
        pages.rank(rank)[:] = pattern(pages.layout, rank, pages.num_blocks)


def assert_delivered(pages: MappedPages, writes: Sequence[PageWrite]) -> None:
    """Exactly the bytes of `writes` have come, and every other byte is `UNTOUCHED`."""
    layout = pages.layout
    for rank in range(len(layout.shards)):
        source = pattern(layout, rank, pages.num_blocks)
        expected = np.full_like(source, UNTOUCHED)
        for write in writes:
            block, start, end = write.destination_span(layout.num_layers)
            expected[block, start:end] = source[write.source_block, start:end]
        np.testing.assert_array_equal(pages.rank(rank), expected)


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where a source finds a destination."""

    number: int
    """Of the destination; paths and ports are used again by later ones."""
    transport: str
    layout: PoolLayout
    paths: list[str]
    address: str
    pid: int
    nixl: NixlEndpoint | None
    secret: bytes = SECRET
    with_checksums: bool = True


@dataclass(frozen=True, kw_only=True)
class WriteJob:
    endpoint: Endpoint
    source_layout: PoolLayout
    transfer_id: TransferId
    writes: list[PageWrite]
    stop_after: int | None = None
    """The `ShouldStop` says True after it was asked so many times."""
    announce_after: int | None = None
    """Asked so often, the source sends "busy" and then waits for ever."""
    num_blocks: int = NUM_BLOCKS


_numbers = itertools.count()


class Destination:
    """Pools, arrivals and a listening transport in this process."""

    def __init__(
        self,
        transport: str,
        layout: PoolLayout,
        num_blocks: int = NUM_BLOCKS,
        *,
        with_checksums: bool = True,
    ) -> None:
        self.transport = transport
        self.number = next(_numbers)
        self.pools = SharedPools(layout, num_blocks)
        self.pages = self.pools.pages
        self.arrivals = Arrivals(self.pages, with_checksums=with_checksums)
        self._with_checksums = with_checksums
        self._socket_server: PageSocketServer | None = None
        self._grpc_server: grpc.Server | None = None
        self._thread: threading.Thread | None = None
        self._nixl: NixlPools | None = None
        self._address = self._listen()

    def _listen(self) -> str:
        if self.transport == "sockets":
            self._socket_server = PageSocketServer(self.arrivals, SECRET)
            return self._socket_server.address
        if self.transport == "nixl":
            self._nixl = NixlPools(self.pages, f"destination-{os.getpid()}-{self.number}")
        if self.transport == "process group":
            # Brings torch, which the other transports' processes do without.
            from page_group_jobs import receive_in_thread

            path = f"{tempfile.mkdtemp()}/store"
            self._thread = receive_in_thread(path, self.arrivals, self.pages)
            return path
        if self.transport == "grpc":
            self._grpc_server = grpc.server(futures.ThreadPoolExecutor(2))
            add_page_stream(self._grpc_server, self.arrivals, SECRET)
            port = self._grpc_server.add_insecure_port("127.0.0.1:0")
            self._grpc_server.start()
            return f"127.0.0.1:{port}"
        return ""

    def endpoint(self, secret: bytes = SECRET) -> Endpoint:
        return Endpoint(
            number=self.number,
            transport=self.transport,
            layout=self.pages.layout,
            paths=self.pools.paths,
            address=self._address,
            pid=os.getpid(),
            nixl=None if self._nixl is None else self._nixl.endpoint,
            secret=secret,
            with_checksums=self._with_checksums,
        )

    def expect(self, transfer_id: TransferId, writes: Sequence[PageWrite]) -> Expectation:
        """Expect `writes`, which are numbered in order of blocks, then layer ranges."""
        by_index = sorted(set(writes), key=lambda write: write.index)
        num_layers = self.pages.layout.num_layers
        spans = [write.destination_span(num_layers) for write in by_index]
        ranges = list(dict.fromkeys((span.layer_start, span.layer_end) for span in spans))
        blocks = list(dict.fromkeys(span.block for span in spans))
        return self.arrivals.expect(transfer_id, blocks, ranges)

    def acknowledge(
        self, transfer_id: TransferId, writes: Sequence[PageWrite], checksums: Sequence[int]
    ) -> None:
        """What the control plane does with the source's answer, where the transport counts so."""
        if self.transport in ONE_SIDED:
            self.arrivals.confirm(transfer_id, [write.index for write in writes], checksums)

    def close_transport(self) -> None:
        if self._socket_server is not None:
            self._socket_server.close()
        if self._grpc_server is not None:
            self._grpc_server.stop(None).wait()
        if self._nixl is not None:
            self._nixl.close()
        if self._thread is not None:
            self._thread.join(2 * TIMEOUT_S)

    def close(self) -> None:
        self.close_transport()
        self.pools.close()


ONE_SIDED = frozenset({"shared memory", "nixl"})
HAS_NIXL = importlib.util.find_spec("nixl_cu12") is not None
TRANSPORTS = (
    "shared memory",
    "sockets",
    "grpc",
    "process group",
    pytest.param(
        "nixl", marks=pytest.mark.skipif(not HAS_NIXL, reason="nixl-cu12 is not installed")
    ),
)


@dataclass
class Source:
    """A process that holds patterned pages and writes them where it is told."""

    connection: Connection = field(init=False)

    def __post_init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=run_source, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def start(self, job: WriteJob) -> None:
        self.connection.send(job)

    def receive(self) -> object:
        """Its next message: the checksums of a write, the text of a `TransferError`, or "busy"."""
        assert self.connection.poll(TIMEOUT_S), "the source does not answer"
        return self.connection.recv()

    def write(self, job: WriteJob) -> list[int]:
        """Checksums; raises `TransferError` as the source saw it."""
        self.start(job)
        answer = self.receive()
        if isinstance(answer, str):
            raise TransferError(answer)
        assert isinstance(answer, list)
        return cast("list[int]", answer)

    def forget(self, number: int) -> None:
        """Close the writers to this destination."""
        self.connection.send(number)
        assert self.receive() is None

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def run_source(connection: Connection) -> None:
    """Body of the source's process: jobs until the test hangs up."""
    writers = _Writers()
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        if isinstance(job, int):
            connection.send(writers.forget(job))
            continue
        assert isinstance(job, WriteJob)
        try:
            connection.send(writers.run(job, connection))
        except (TransferError, ValueError) as error:
            connection.send(f"{type(error).__name__}: {error}")


class _Writers:
    """One writer per endpoint, as an engine keeps them."""

    def __init__(self) -> None:
        self._writers: dict[tuple[object, ...], PageWriter] = {}

    def run(self, job: WriteJob, connection: Connection) -> list[int]:
        num_asked = 0

        def should_stop() -> bool:
            nonlocal num_asked
            num_asked += 1
            if job.announce_after is not None and num_asked > job.announce_after:
                connection.send("busy")
                threading.Event().wait()
            return job.stop_after is not None and num_asked > job.stop_after

        return self._writer(job).write(job.transfer_id, job.writes, should_stop)

    def forget(self, number: int) -> None:
        for key in [key for key in self._writers if key[0] == number]:
            self._writers.pop(key).close()

    def _writer(self, job: WriteJob) -> PageWriter:
        endpoint = job.endpoint
        key = (endpoint.number, endpoint.secret, job.source_layout)
        if key not in self._writers:
            self._writers[key] = _open_writer(job)
        return self._writers[key]


def _open_writer(job: WriteJob) -> PageWriter:
    pages = SharedPools(job.source_layout, job.num_blocks).pages
    fill_with_pattern(pages)
    endpoint = job.endpoint
    on = endpoint.with_checksums
    outgoing = OutgoingPages(pages, endpoint.layout)
    match endpoint.transport:
        case "shared memory":
            theirs = MappedPages.open(endpoint.layout, endpoint.paths)
            return SharedMemoryWriter(pages, theirs, endpoint.pid, with_checksums=on)
        case "sockets":
            return SocketWriter(outgoing, endpoint.address, endpoint.secret, with_checksums=on)
        case "grpc":
            channel = grpc.insecure_channel(endpoint.address)
            return GrpcStreamWriter(outgoing, channel, endpoint.secret, with_checksums=on)
        case "nixl":
            assert endpoint.nixl is not None
            pools = NixlPools(pages, f"source-{os.getpid()}-{endpoint.number}-{next(_numbers)}")
            return NixlWriter(pools, endpoint.nixl, with_checksums=on)
        case "process group":
            from page_group_jobs import open_group_writer

            return open_group_writer(endpoint.address, pages, endpoint.layout, on)
        case _:
            raise ValueError(f"no transport {endpoint.transport!r}")


def whole_writes(pairs: Sequence[tuple[int, int]]) -> list[PageWrite]:
    """Whole pages, (source block, destination block) each."""
    return [
        PageWrite(index, BlockId(source), BlockId(destination))
        for index, (source, destination) in enumerate(pairs)
    ]


def spans_of(writes: Sequence[PageWrite]) -> list[PageSpan]:
    return [write.destination_span(NUM_LAYERS) for write in writes]
