"""The ranks of one engine on one host: collectives through shared memory instead of sockets.

gloo takes about a millisecond for the small sums of a decode step, and there are two per layer;
here they cost tens of microseconds (`kernels/cpu/shared_reduce.py`). `TorchDistributedGroup` is
the plain twin. Float32, bfloat16 and float16 CPU tensors.
"""

import ctypes
import mmap
import os
import time

from torch import Tensor, cat, empty_like
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from pageray.cluster.errors import EngineDeadError
from pageray.kernels.cpu import shared_reduce
from pageray.kernels.cpu.memory import Pointer, pointer
from pageray.kernels.ops import RankSums
from pageray.workers.channel.mailbox import PeerDeadError
from pageray.workers.channel.pulse import ProcessPulse

SLOT_BYTES = 1 << 20
"""Larger tensors go in pieces."""


class SharedMemoryGroup:
    """All ranks construct theirs at about the same time, and then make the same calls in order.

    `store`: where they tell each other their process ids and where the memory is.
    """

    def __init__(self, *, store: Store, rank: int, size: int, timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        self._timeout_s = timeout_s
        num_bytes = shared_reduce.region_bytes(size, SLOT_BYTES)
        self._memfd = _open_region(store, rank, num_bytes)
        self._mapping = mmap.mmap(self._memfd, num_bytes)
        self._anchor = ctypes.c_char.from_buffer(self._mapping)
        self._address = ctypes.addressof(self._anchor)
        self.operation = 0
        store.set(f"pid-{rank}", str(os.getpid()))
        self._peers = [
            ProcessPulse(int(store.get(f"pid-{peer}")), f"rank {peer} of {size}")
            for peer in range(size)
            if peer != rank
        ]

    def all_reduce(self, x: Tensor) -> None:
        if not x.is_contiguous():
            raise ValueError(f"all_reduce needs a contiguous tensor, got strides {x.stride()}.")
        for piece, count in self._pieces(x):
            self._exchange(piece, count)
            shared_reduce.sum_slots(
                self._address, self.size, SLOT_BYTES, self.operation, piece, count
            )

    def gather_columns(self, x_RW: Tensor, width_total: int) -> Tensor | None:
        x_RW = x_RW.contiguous()
        parts = [x_RW if peer == 0 else empty_like(x_RW) for peer in range(self.size)]
        targets = [self._pieces(part) for part in parts]
        for number, (piece, count) in enumerate(self._pieces(x_RW)):
            self._exchange(piece, count)
            for peer in range(1, self.size) if self.rank == 0 else ():
                shared_reduce.copy_slot(
                    self._address,
                    self.size,
                    SLOT_BYTES,
                    peer,
                    self.operation,
                    targets[peer][number][0],
                    count,
                )
        return cat(parts, dim=1)[:, :width_total] if self.rank == 0 else None

    def compiled_sums(self) -> RankSums | None:
        """The group itself: `pageray.kernels.ops.RankSums`."""
        return self

    @property
    def region(self) -> tuple[int, int, int, int]:
        return self._address, self.size, SLOT_BYTES, self.rank

    def close(self) -> None:
        for peer in self._peers:
            peer.close()
        self._peers = []
        if self._memfd >= 0:
            del self._anchor
            self._mapping.close()
            os.close(self._memfd)
            self._memfd = -1

    def _pieces(self, x: Tensor) -> list[tuple[Pointer, int]]:
        """(address and dtype, element count) of every slot-sized piece of a contiguous tensor."""
        address, cell = pointer(x)
        step = SLOT_BYTES // x.element_size()
        return [
            ((address + start * x.element_size(), cell), min(step, x.numel() - start))
            for start in range(0, x.numel(), step)
        ]

    def _exchange(self, piece: Pointer, count: int) -> None:
        """Contribute a piece to the next operation and wait for everybody else's."""
        self.operation += 1
        shared_reduce.contribute(
            self._address, self.size, SLOT_BYTES, self.rank, self.operation, piece, count
        )
        if shared_reduce.wait_for_all(self._address, self.size, self.operation) >= 0:
            self.wait_for_others()

    def wait_for_others(self) -> None:
        deadline = time.monotonic() + self._timeout_s
        while True:
            late = shared_reduce.wait_for_all(self._address, self.size, self.operation)
            if late < 0:
                return
            try:
                for peer in self._peers:
                    peer()
            except PeerDeadError as error:
                raise EngineDeadError(str(error)) from error
            if time.monotonic() > deadline:
                raise EngineDeadError(
                    f"rank {late} of {self.size} has not joined a collective within "
                    f"{self._timeout_s:g} s."
                )


def _open_region(store: Store, rank: int, num_bytes: int) -> int:
    """A file descriptor of the memory that rank 0 makes and the others open."""
    if rank == 0:
        memfd = os.memfd_create("pageray-collectives", os.MFD_CLOEXEC)
        os.ftruncate(memfd, num_bytes)
        store.set("region", f"/proc/{os.getpid()}/fd/{memfd}")
        return memfd
    return os.open(store.get("region").decode(), os.O_RDWR | os.O_CLOEXEC)
