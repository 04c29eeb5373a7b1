"""The sending process of `transfer_bench.py`: holds a pool of pages and writes them when told."""

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import grpc
import numpy as np
import torch

from pageray.cluster.ids import BlockId, TransferId
from pageray.cluster.page_layout import PoolLayout
from pageray.router.bench.transfer_destination import join_group
from pageray.workers.malloc import keep_freed_memory
from pageray.workers.transfer.grpc_writer import GrpcStreamWriter
from pageray.workers.transfer.mapped_pages import MappedPages
from pageray.workers.transfer.nixl_pools import NixlEndpoint, NixlPools
from pageray.workers.transfer.nixl_writer import NixlWriter
from pageray.workers.transfer.outgoing import OutgoingPages
from pageray.workers.transfer.page_write import plan_writes
from pageray.workers.transfer.page_writer import PageWriter
from pageray.workers.transfer.process_group_writer import PageGroupWriter
from pageray.workers.transfer.shared_memory import SharedMemoryWriter
from pageray.workers.transfer.socket_options import tune
from pageray.workers.transfer.socket_writer import SocketWriter
from pageray.workers.transfer.tensor_pages import OutgoingTensors, TensorPages

CHUNK_BYTES = 1 << 20
"""Of the plain TCP stream."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Where the servers of a `Destination` listen."""

    socket_address: str
    grpc_address: str
    store_path: str
    nixl: NixlEndpoint | None


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where the pages go. `source_path` is the pool that this process sends from."""

    layout: PoolLayout
    source_path: str
    destination_path: str
    destination_pid: int
    peers: dict[bool, Peer]
    """Without and with checksums."""
    stream_address: str
    """Of a plain socket that reads and throws away."""
    secret: bytes


@dataclass(frozen=True, kw_only=True)
class Send:
    """Write pages; for every `batch` of them the source answers with their checksums."""

    transport: str
    with_checksums: bool
    transfer_id: TransferId
    source_blocks: list[BlockId]
    destination_blocks: list[BlockId]
    batch: int


@dataclass(frozen=True)
class CopyAll:
    """The memory reference: one copy from pool to pool; answers with the seconds it took."""


@dataclass(frozen=True)
class StreamAll:
    """The socket reference: `num_bytes` down a plain TCP stream."""

    num_bytes: int


def run_source(target: Target, connection: Connection) -> None:
    """Body of the process: answers jobs until the other end hangs up."""
    keep_freed_memory()
    source = _Source(target)
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        match job:
            case Send():
                source.send(job, connection.send)
            case CopyAll():
                connection.send(source.copy_all())
            case StreamAll():
                source.stream_all(job.num_bytes)
            case _:
                raise ValueError(f"no such job: {job!r}")


class _Source:
    def __init__(self, target: Target) -> None:
        self._pages = MappedPages.open(target.layout, [target.source_path])
        self._theirs = MappedPages.open(target.layout, [target.destination_path])
        self._target = target
        self._writers: dict[tuple[str, bool], PageWriter] = {}
        host, _, port = target.stream_address.rpartition(":")
        self._stream = socket.create_connection((host, int(port)))
        tune(self._stream)

    def send(self, job: Send, answer: Callable[[list[int]], None]) -> None:
        key = job.transport, job.with_checksums
        if key not in self._writers:
            self._writers[key] = self._open(*key)
        writes = plan_writes(job.source_blocks, job.destination_blocks)
        for start in range(0, len(writes), job.batch):
            answer(self._writers[key].write(job.transfer_id, writes[start : start + job.batch]))

    def copy_all(self) -> float:
        start_s = time.perf_counter()
        np.copyto(self._theirs.rank(0)[1:], self._pages.rank(0)[1:])
        return time.perf_counter() - start_s

    def stream_all(self, num_bytes: int) -> None:
        chunk = memoryview(bytes(CHUNK_BYTES))
        for start in range(0, num_bytes, CHUNK_BYTES):
            self._stream.sendall(chunk[: num_bytes - start])

    def _open(self, transport: str, with_checksums: bool) -> PageWriter:
        target, outgoing = self._target, OutgoingPages(self._pages, self._target.layout)
        peer, on = target.peers[with_checksums], with_checksums
        match transport:
            case "shared memory":
                return SharedMemoryWriter(
                    self._pages, self._theirs, target.destination_pid, with_checksums=on
                )
            case "sockets":
                return SocketWriter(outgoing, peer.socket_address, target.secret, with_checksums=on)
            case "gRPC stream":
                channel = grpc.insecure_channel(peer.grpc_address)
                return GrpcStreamWriter(outgoing, channel, target.secret, with_checksums=on)
            case "process group":
                tensors = TensorPages(target.layout, [torch.from_numpy(self._pages.rank(0))])
                return PageGroupWriter(
                    OutgoingTensors(tensors, target.layout),
                    join_group(peer.store_path, 0),
                    with_checksums=on,
                )
            case "NIXL" if peer.nixl is not None:
                pools = NixlPools(self._pages, f"bench-source-{os.getpid()}-{on}")
                return NixlWriter(pools, peer.nixl, with_checksums=on)
            case _:
                raise ValueError(f"no transport {transport!r}.")
