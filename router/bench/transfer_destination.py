"""The receiving side of `transfer_bench.py`: pools, arrivals, and every transport's server."""

import importlib.util
import os
import tempfile
import threading
from concurrent import futures

import grpc
import numpy as np
import torch
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from pageray.cluster.page_layout import PoolLayout
from pageray.workers.transfer.arrivals import Arrivals
from pageray.workers.transfer.grpc_stream import add_page_stream
from pageray.workers.transfer.mapped_pages import MappedPages
from pageray.workers.transfer.nixl_pools import NixlEndpoint, NixlPools
from pageray.workers.transfer.page_writer import TransferError
from pageray.workers.transfer.process_group import PointToPoint
from pageray.workers.transfer.process_group_receiver import PageGroupReceiver
from pageray.workers.transfer.socket_server import PageSocketServer
from pageray.workers.transfer.tensor_pages import TensorPages

GROUP_TIMEOUT_S = 120.0


def has_nixl() -> bool:
    return importlib.util.find_spec("nixl_cu12") is not None


class Pool:
    """A pool of one rank, full of random bytes, all of it touched."""

    def __init__(self, layout: PoolLayout, num_pages: int, seed: int) -> None:
        self._memfd = os.memfd_create("pageray-bench-pool", os.MFD_CLOEXEC)
        os.ftruncate(self._memfd, (num_pages + 1) * layout.page_bytes(0))
        self.pages = MappedPages.open(layout, [self.path])
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


class Destination:
    """Everything that receives into `pages`, with or without checksums."""

    def __init__(self, pages: MappedPages, secret: bytes, *, with_checksums: bool) -> None:
        self.arrivals = Arrivals(pages, with_checksums=with_checksums)
        self._socket_server = PageSocketServer(self.arrivals, secret)
        self.socket_address = self._socket_server.address
        self._grpc_server = grpc.server(futures.ThreadPoolExecutor(2))
        add_page_stream(self._grpc_server, self.arrivals, secret)
        port = self._grpc_server.add_insecure_port("127.0.0.1:0")
        self.grpc_address = f"127.0.0.1:{port}"
        self._grpc_server.start()
        self._pages = pages
        self._folder = tempfile.TemporaryDirectory()
        self.store_path = f"{self._folder.name}/store"
        self._group_thread: threading.Thread | None = None
        self._nixl: NixlPools | None = None
        if has_nixl():
            self._nixl = NixlPools(pages, f"bench-{os.getpid()}-{with_checksums}")

    @property
    def nixl(self) -> NixlEndpoint | None:
        return None if self._nixl is None else self._nixl.endpoint

    def receive_from_group(self) -> None:
        """Join the process group with the source, once, and serve its writes in a thread."""
        if self._group_thread is None:
            self._group_thread = threading.Thread(target=self._serve_group, daemon=True)
            self._group_thread.start()

    def close(self) -> None:
        """After the source has ended."""
        self._socket_server.close()
        self._grpc_server.stop(None).wait()
        if self._nixl is not None:
            self._nixl.close()
        if self._group_thread is not None:
            self._group_thread.join()
        self._folder.cleanup()

    def _serve_group(self) -> None:
        pages = TensorPages(self._pages.layout, [torch.from_numpy(self._pages.rank(0))])
        try:
            receiver = PageGroupReceiver(self.arrivals, pages, join_group(self.store_path, 1))
            while True:
                receiver.receive()
        except TransferError:
            return  # the source has ended


def join_group(store_path: str, rank: int) -> PointToPoint:
    return PointToPoint(
        store=FileStore(store_path, 2),
        rank=rank,
        peer=1 - rank,
        device=torch.device("cpu"),
        timeout_s=GROUP_TIMEOUT_S,
    )
