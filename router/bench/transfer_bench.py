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
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import cast

from pageray.cluster.errors import ServerError
from pageray.cluster.ids import BlockId, TransferId
from pageray.cluster.page_layout import PoolLayout
from pageray.router.bench.transfer_destination import Destination, Pool, has_nixl
from pageray.router.bench.transfer_source import (
    CHUNK_BYTES,
    CopyAll,
    Peer,
    Send,
    StreamAll,
    Target,
    run_source,
)
from pageray.workers.malloc import keep_freed_memory
from pageray.workers.transfer.socket_options import tune

SMOLLM2_LAYOUT = PoolLayout(
    num_layers=30, block_size=16, head_dim=64, element_bytes=2, shards=((0, 3),)
)
"""SmolLM2-135M in bfloat16 on one rank: 368,640 bytes a page."""

SHARED_MEMORY, SOCKETS, GRPC_STREAM = "shared memory", "sockets", "gRPC stream"
PROCESS_GROUP, NIXL = "process group", "NIXL"
_ONE_SIDED = (SHARED_MEMORY, NIXL)
CASES = (
    (SHARED_MEMORY, False),
    (SHARED_MEMORY, True),
    (SOCKETS, False),
    (SOCKETS, True),
    (GRPC_STREAM, False),
    (GRPC_STREAM, True),
    (PROCESS_GROUP, True),
    *([(NIXL, True)] if has_nixl() else []),
)
"""(transport, whether with checksums), in the order of the report. NIXL where installed."""

_ACKNOWLEDGED_PAGES = 16
"""Transports without a receiver: pages per acknowledgement, so that the destination verifies while the source
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
        self._pools = [Pool(SMOLLM2_LAYOUT, num_pages, seed + number) for number in (0, 1)]
        secret = os.urandom(32)
        self._destinations = {
            on: Destination(self._pools[1].pages, secret, with_checksums=on) for on in (False, True)
        }
        listener = socket.create_server(("127.0.0.1", 0))
        self._connection, self._process = _start(
            Target(
                layout=SMOLLM2_LAYOUT,
                source_path=self._pools[0].path,
                destination_path=self._pools[1].path,
                destination_pid=os.getpid(),
                peers={on: _peer(destination) for on, destination in self._destinations.items()},
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
        destination = self._destinations[with_checksums]
        arrivals = destination.arrivals
        if transport == PROCESS_GROUP:
            destination.receive_from_group()
        blocks = [BlockId(block) for block in range(1, self._num_pages + 1)]
        destination_blocks = self._random.sample(blocks, len(blocks))
        transfer_id = TransferId(next(self._transfer_ids))
        source_blocks = self._random.sample(blocks, len(blocks))
        expectation = arrivals.expect(transfer_id, destination_blocks)
        batch = _ACKNOWLEDGED_PAGES if transport in _ONE_SIDED else len(blocks)
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
            if transport in _ONE_SIDED:
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
        for destination in self._destinations.values():
            destination.close()
        for pool in self._pools:
            pool.close()


def _peer(destination: Destination) -> Peer:
    return Peer(
        socket_address=destination.socket_address,
        grpc_address=destination.grpc_address,
        store_path=destination.store_path,
        nixl=destination.nixl,
    )


def _start(target: Target) -> tuple[Connection, BaseProcess]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_source, args=(target, theirs), daemon=True)
    process.start()
    theirs.close()
    return ours, process
