"""Both ends of pages through a process group, for `transfer_jobs.py`."""

import threading

import torch
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from pageray.cluster.page_layout import PoolLayout
from pageray.workers.transfer.arrivals import Arrivals
from pageray.workers.transfer.mapped_pages import MappedPages
from pageray.workers.transfer.page_writer import TransferError
from pageray.workers.transfer.process_group import PointToPoint
from pageray.workers.transfer.process_group_receiver import PageGroupReceiver
from pageray.workers.transfer.process_group_writer import PageGroupWriter
from pageray.workers.transfer.tensor_pages import OutgoingTensors, TensorPages

TIMEOUT_S = 20.0


def open_group(path: str, rank: int) -> PointToPoint:
    return PointToPoint(
        store=FileStore(path, 2),
        rank=rank,
        peer=1 - rank,
        device=torch.device("cpu"),
        timeout_s=TIMEOUT_S,
    )


def as_tensors(pages: MappedPages) -> TensorPages:
    ranks = range(len(pages.layout.shards))
    return TensorPages(pages.layout, [torch.from_numpy(pages.rank(rank)) for rank in ranks])


def open_group_writer(
    path: str, pages: MappedPages, destination: PoolLayout, with_checksums: bool
) -> PageGroupWriter:
    outgoing = OutgoingTensors(as_tensors(pages), destination)
    return PageGroupWriter(outgoing, open_group(path, 0), with_checksums=with_checksums)


def receive_in_thread(path: str, arrivals: Arrivals, pages: MappedPages) -> threading.Thread:
    """Serve writes until the source hangs up."""

    def receive() -> None:
        try:
            receiver = PageGroupReceiver(arrivals, as_tensors(pages), open_group(path, 1))
            while True:
                receiver.receive()
        except TransferError:
            return

    thread = threading.Thread(target=receive, name="page-group-receive")
    thread.start()
    return thread
