"""Moving pages between two processes of this host, by every transport, beside its plain reference.

A shared-memory row is compared with one large memcpy between the same two pools, a socket or gRPC
row with a plain TCP stream from one buffer into one buffer. Both are measured in turn, round by
round, so that a slow minute of the machine hits both.
"""

import itertools
import multiprocessing
import os
import random
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import cast

import grpc
import numpy as np

from pageray.cluster.errors import ServerError
from pageray.cluster.ids import BlockId, TransferId
from pageray.cluster.page_layout import PoolLayout
from pageray.router.bench.transfer_source import (
    CHUNK_BYTES,
    CopyAll,
    Send,
    StreamAll,
    Target,
    run_source,
)
from pageray.workers.transfer.arrivals import Arrivals
from pageray.workers.transfer.grpc_stream import add_page_stream
from pageray.workers.transfer.malloc import keep_freed_memory
from pageray.workers.transfer.mapped_pages import MappedPages
from pageray.workers.transfer.socket_options import tune
from pageray.workers.transfer.socket_server import PageSocketServer

SMOLLM2_LAYOUT = PoolLayout(
    num_layers=30, block_size=16, head_dim=64, element_bytes=2, shards=((0, 3),)
)
"""SmolLM2-135M in bfloat16 on one rank: 368,640 bytes a page."""

SHARED_MEMORY, SOCKETS, GRPC_STREAM = "shared memory", "sockets", "gRPC stream"
CASES = (
    (SHARED_MEMORY, False),
    (SHARED_MEMORY, True),
    (SOCKETS, False),
    (SOCKETS, True),
    (GRPC_STREAM, False),
    (GRPC_STREAM, True),
)
"""(transport, whether with checksums), in the order of the report."""

_ACKNOWLEDGED_PAGES = 16
"""Shared memory: pages per acknowledgement, so that the destination verifies while the source
copies."""
_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class TransferRow:
    """Medians over the rounds. `ratio` is the median of the rounds' ratios."""

    transport: str
    with_checksums: bool
    gbytes_per_s: float
    pages_per_s: float
    reference: str
    reference_gbytes_per_s: float
    ratio: float


def measure_transfers(
    num_pages: int, num_rounds: int, seed: int, on_round: Callable[[], object]
) -> list[TransferRow]:
    """Every case, `num_rounds` times after one round to warm up; `on_round` is told after each
    round of each case. Needs twice the bytes of `num_pages` pages as memory."""
    keep_freed_memory()
    bench = _Bench(num_pages, seed)
    try:
        rows: list[TransferRow] = []
        for transport, with_checksums in CASES:
            reference = bench.copy_all if transport == SHARED_MEMORY else bench.stream_all
            pairs: list[tuple[float, float]] = []
            for _ in range(num_rounds + 1):
                pairs.append((bench.send(transport, with_checksums), reference()))
                on_round()
            rows.append(_row(transport, with_checksums, bench.num_bytes, num_pages, pairs[1:]))
        return rows
    finally:
        bench.close()


def _row(
    transport: str,
    with_checksums: bool,
    num_bytes: int,
    num_pages: int,
    seconds: Sequence[tuple[float, float]],
) -> TransferRow:
    ours_s = statistics.median(pair[0] for pair in seconds)
    return TransferRow(
        transport=transport,
        with_checksums=with_checksums,
        gbytes_per_s=num_bytes / ours_s / 1e9,
        pages_per_s=num_pages / ours_s,
        reference="memcpy" if transport == SHARED_MEMORY else "plain TCP",
        reference_gbytes_per_s=num_bytes / statistics.median(pair[1] for pair in seconds) / 1e9,
        ratio=statistics.median(reference_s / our_s for our_s, reference_s in seconds),
    )


class _Bench:
    """The destination, in this process, and the source process."""

    def __init__(self, num_pages: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._num_pages = num_pages
        self.num_bytes = num_pages * SMOLLM2_LAYOUT.page_bytes(0)
        self._transfer_ids = itertools.count(1)
        self._pools = [_Pool(num_pages, seed), _Pool(num_pages, seed + 1)]
        self._arrivals = {
            on: Arrivals(self._pools[1].pages, with_checksums=on) for on in (False, True)
        }
        secret = os.urandom(32)
        self._socket_servers = {
            on: PageSocketServer(arrivals, secret) for on, arrivals in self._arrivals.items()
        }
        self._grpc_servers = {
            on: _GrpcServer(arrivals, secret) for on, arrivals in self._arrivals.items()
        }
        listener = socket.create_server(("127.0.0.1", 0))
        self._connection, self._process = _start(
            Target(
                layout=SMOLLM2_LAYOUT,
                source_path=self._pools[0].path,
                destination_path=self._pools[1].path,
                destination_pid=os.getpid(),
                socket_addresses={on: s.address for on, s in self._socket_servers.items()},
                grpc_addresses={on: s.address for on, s in self._grpc_servers.items()},
                stream_address=f"127.0.0.1:{listener.getsockname()[1]}",
                secret=secret,
            )
        )
        self._stream = listener.accept()[0]
        listener.close()
        tune(self._stream)

    def send(self, transport: str, with_checksums: bool) -> float:
        """All pages, in random order, to random places; returns the seconds until the last one
        was counted (and verified)."""
        arrivals = self._arrivals[with_checksums]
        blocks = [BlockId(block) for block in range(1, self._num_pages + 1)]
        destination_blocks = self._random.sample(blocks, len(blocks))
        transfer_id = TransferId(next(self._transfer_ids))
        source_blocks = self._random.sample(blocks, len(blocks))
        expectation = arrivals.expect(transfer_id, destination_blocks)
        batch = _ACKNOWLEDGED_PAGES if transport == SHARED_MEMORY else len(blocks)
        start_s = time.perf_counter()
        self._connection.send(
            Send(
                transport=transport,
                with_checksums=with_checksums,
                transfer_id=transfer_id,
                source_blocks=source_blocks,
                destination_blocks=destination_blocks,
                batch=batch,
            )
        )
        for start in range(0, len(blocks), batch):
            indices = range(start, min(start + batch, len(blocks)))
            checksums = cast("list[int]", self._receive())
            if transport == SHARED_MEMORY:
                arrivals.confirm(transfer_id, indices, checksums)
        if not expectation.wait(_TIMEOUT_S):
            raise ServerError(f"{transport}: the transfer failed: {expectation.failure}")
        elapsed_s = time.perf_counter() - start_s
        arrivals.close(transfer_id)
        return elapsed_s

    def copy_all(self) -> float:
        """Seconds of one large copy from the source's pool to the destination's."""
        self._connection.send(CopyAll())
        return cast("float", self._receive())

    def stream_all(self) -> float:
        """Seconds of a plain TCP stream of as many bytes."""
        buffer = memoryview(bytearray(CHUNK_BYTES))
        start_s = time.perf_counter()
        self._connection.send(StreamAll(self.num_bytes))
        num_left = self.num_bytes
        while num_left:
            num_left -= self._stream.recv_into(buffer[:num_left])
        return time.perf_counter() - start_s

    def _receive(self) -> object:
        """The source's next answer; `ServerError` when it has died."""
        try:
            return self._connection.recv()
        except EOFError as error:
            raise ServerError("the sending process of the benchmark has died.") from error

    def close(self) -> None:
        self._connection.close()
        self._process.join()
        self._stream.close()
        for server in self._socket_servers.values():
            server.close()
        for server in self._grpc_servers.values():
            server.close()
        for pool in self._pools:
            pool.close()


class _GrpcServer:
    def __init__(self, arrivals: Arrivals, secret: bytes) -> None:
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        add_page_stream(self._server, arrivals, secret)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def close(self) -> None:
        self._server.stop(None).wait()


class _Pool:
    """A pool of random bytes, all of it touched."""

    def __init__(self, num_pages: int, seed: int) -> None:
        self._memfd = os.memfd_create("pageray-bench-pool", os.MFD_CLOEXEC)
        os.ftruncate(self._memfd, (num_pages + 1) * SMOLLM2_LAYOUT.page_bytes(0))
        self.pages = MappedPages.open(SMOLLM2_LAYOUT, [self.path])
        pages = self.pages.rank(0)
        pages[0] = np.random.default_rng(seed).integers(0, 256, pages[0].shape, np.uint8)
        for number in range(1, num_pages + 1):
            np.add(pages[number - 1], number % 251, out=pages[number])

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._memfd}"

    def close(self) -> None:
        self.pages.close()
        os.close(self._memfd)


def _start(target: Target) -> tuple[Connection, BaseProcess]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_source, args=(target, theirs), daemon=True)
    process.start()
    theirs.close()
    return ours, process
