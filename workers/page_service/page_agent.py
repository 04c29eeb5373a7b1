"""One engine's page service: what others need to pull from it, and what it needs to pull itself.

On CPU the ranks of an engine are on its host and their pools are files in memory, so one agent in
the engine's own process moves bytes for all of them.
"""

import os
from pathlib import Path

from pageray.cluster.block_keys import BlockContent
from pageray.cluster.coordinator.messages import Endpoint, EngineInfo, Role
from pageray.cluster.errors import ConfigError
from pageray.cluster.generation import GenerateRequest
from pageray.cluster.ids import EngineId, Epoch
from pageray.workers.engine import Engine
from pageray.workers.page_service.control import add_control, create_server
from pageray.workers.page_service.host import host_id
from pageray.workers.page_service.messages import PushRequest, TransportName
from pageray.workers.page_service.page_server import PageServer
from pageray.workers.page_service.peers import Peers
from pageray.workers.page_service.prefill_job import PrefillRunner
from pageray.workers.page_service.puller import PullCancel, Puller, PullOutcome
from pageray.workers.page_service.settler import Settler
from pageray.workers.page_service.writer_cache import WriterCache
from pageray.workers.transfer.arrivals import Arrivals
from pageray.workers.transfer.grpc_stream import add_page_stream
from pageray.workers.transfer.grpc_writer import GrpcStreamWriter
from pageray.workers.transfer.mapped_pages import MappedPages
from pageray.workers.transfer.outgoing import OutgoingPages
from pageray.workers.transfer.page_writer import PageWriter
from pageray.workers.transfer.shared_memory import SharedMemoryWriter
from pageray.workers.transfer.socket_server import PageSocketServer
from pageray.workers.transfer.socket_writer import SocketWriter

CONTROL_THREADS = 16
"""Pushes and cancels served at once."""


class PageAgent:
    """Serves from construction on; `close` it before the engine is shut down."""

    def __init__(
        self,
        engine: Engine,
        *,
        engine_id: EngineId,
        epoch: Epoch,
        secret: bytes,
        host: str = "127.0.0.1",
        role: Role = "both",
        prefills: PrefillRunner | None = None,
        memory_id: str | None = None,
    ) -> None:
        """`secret` is the application's; `host` the address to listen on. With `prefills` the
        engine computes prompts for others. Engines with equal `memory_id` write into each other's
        memory; None: those of one host do.

        Raises `ConfigError` for an engine whose pages this process cannot map.
        """
        paths = [path for path in engine.pages.paths if path is not None]
        if len(paths) != len(engine.pages.paths):
            raise ConfigError("Pages in device memory cannot be shared with other engines yet.")
        self._local = MappedPages.open(engine.found.layout, paths)
        self.arrivals = Arrivals(self._local)
        self._secret = secret
        self._sockets = PageSocketServer(self.arrivals, secret, host)
        self._peers = Peers(secret)
        self._writers = WriterCache(self._open_writer)
        self._server = create_server(secret, CONTROL_THREADS)
        port = self._server.add_insecure_port(f"{host}:0")
        self.info = EngineInfo(
            engine_id=engine_id,
            epoch=epoch,
            root_key=engine.found.root_key,
            block_size=engine.found.limits.block_size,
            num_blocks=engine.found.limits.num_blocks,
            layout=engine.found.layout,
            role=role,
            endpoint=Endpoint(
                control_address=f"{host}:{port}",
                data_address=self._sockets.address,
                host_id=memory_id or host_id(),
                pid=os.getpid(),
            ),
        )
        page_server = PageServer(self.info, engine.pages, self._writers, prefills)
        add_control(self._server, page_server.push, page_server.cancel)
        add_page_stream(self._server, self.arrivals, secret)
        self._server.start()
        self._settler = Settler(self.info, self._peers, engine.pages.settle_import)
        self._puller = Puller(
            self.info,
            pages=engine.pages,
            arrivals=self.arrivals,
            peers=self._peers,
            settler=self._settler,
        )

    @property
    def block_bytes(self) -> int:
        """Of one block on all ranks: what pulling it moves."""
        layout = self.info.layout
        return sum(layout.page_bytes(rank) for rank in range(len(layout.shards)))

    def pull(
        self,
        contents: list[BlockContent],
        source: EngineInfo,
        *,
        timeout_s: float,
        cancel: PullCancel | None = None,
        transport: TransportName | None = None,
        compute: GenerateRequest | None = None,
    ) -> PullOutcome:
        """See `Puller.pull`. Blocks; call it in a thread.

        `transport` None: shared memory if `source` is on this host, else sockets.
        """
        return self._puller.pull(
            contents,
            source,
            transport=transport or self._usual_transport(source),
            timeout_s=timeout_s,
            cancel=cancel or PullCancel(),
            compute=compute,
        )

    def close(self, grace_s: float = 0.0) -> None:
        """Stop serving and pulling; pushes under way are broken off after `grace_s`."""
        self._server.stop(grace=grace_s).wait()
        self._sockets.close()
        self._settler.close()
        self._peers.close()
        self._writers.close()
        self._local.close()

    def _usual_transport(self, source: EngineInfo) -> TransportName:
        ours, theirs = self.info.endpoint, source.endpoint
        assert ours is not None, "an agent has an endpoint"
        is_near = theirs is not None and theirs.host_id == ours.host_id
        chosen: TransportName = "shared_memory" if is_near else "sockets"
        return chosen

    def _open_writer(self, request: PushRequest) -> PageWriter:
        destination = request.destination
        if destination.endpoint is None:
            raise ValueError(f"{destination.engine_id} has no page service.")
        match request.transport:
            case "shared_memory":
                _check_pool_paths(request.pool_paths)
                pages = MappedPages.open(destination.layout, request.pool_paths)
                return SharedMemoryWriter(self._local, pages, destination.endpoint.pid)
            case "sockets":
                outgoing = OutgoingPages(self._local, destination.layout)
                return SocketWriter(outgoing, destination.endpoint.data_address, self._secret)
            case "grpc":
                outgoing = OutgoingPages(self._local, destination.layout)
                return GrpcStreamWriter(outgoing, self._peers.channel(destination), self._secret)


def _check_pool_paths(paths: tuple[str, ...]) -> None:
    """A peer may name files of running processes only, never one on disk."""
    for path in paths:
        parts = Path(path).parts
        is_descriptor = (
            len(parts) == 5 and parts[1] == "proc" and parts[2].isdigit() and parts[3] == "fd"
        )
        if not is_descriptor or not os.readlink(path).startswith("/memfd:"):
            raise ValueError(f"{path!r} is no memory of a running process.")
