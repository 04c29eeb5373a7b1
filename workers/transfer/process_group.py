"""Pages through torch.distributed point-to-point: gloo on CPU, NCCL between CUDA devices.

Two-sided: the destination receives while the source writes, in one `PageGroupReceiver.receive`
for one `PageGroupWriter.write`. Both are members of one process group.

    source -> destination   per frame: one notice (`FrameHead` and records, padded), then each
                            write's bytes, one message per destination rank
    destination -> source   one reply after the last frame

A notice of zeros ends a write that was stopped.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed import (
    ProcessGroupGloo,  # pyright: ignore[reportPrivateImportUsage]
    Store,  # pyright: ignore[reportPrivateImportUsage]
    Work,  # pyright: ignore[reportPrivateImportUsage]
)

from pageray.workers.transfer.frames import HEAD_BYTES, MAX_WRITES, RECORD_BYTES
from pageray.workers.transfer.page_writer import TransferError

NOTICE_BYTES = HEAD_BYTES + MAX_WRITES * RECORD_BYTES
_TAG = 0


class _Backend(Protocol):
    """The two operations used here, which torch's own stubs leave out."""

    def send(self, tensors: list[Tensor], destination: int, tag: int) -> Work: ...
    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Work: ...
    def shutdown(self) -> None: ...


class PointToPoint:
    """One end of a connection between two processes that move pages."""

    def __init__(
        self, *, store: Store, rank: int, peer: int, device: torch.device, timeout_s: float
    ) -> None:
        """Joins the group of `rank` and `peer` (0 and 1), which meet at `store`, a store for this
        group alone. Both must construct it at about the same time. No operation waits longer than
        `timeout_s`. Raises `TransferError` when the peer does not come."""
        self.device = device
        self._peer = peer
        self._timeout = timedelta(seconds=timeout_s)
        store.set_timeout(self._timeout)
        try:
            self._backend = _open_backend(store, rank, device, self._timeout)
        except RuntimeError as error:
            raise TransferError(f"the peer did not join the page group: {error}") from error

    def post(self, tensors: Sequence[Tensor]) -> list[Work]:
        """Begin to send each contiguous tensor as one message; they must stay as they are until
        `finish`. Raises `TransferError`."""
        try:
            return [self._backend.send([tensor], self._peer, _TAG) for tensor in tensors]
        except RuntimeError as error:
            raise TransferError(f"sending pages: {error}") from error

    def finish(self, works: Sequence[Work]) -> None:
        """Wait until what was posted has been sent. Raises `TransferError`."""
        try:
            self._wait(works)
        except RuntimeError as error:
            raise TransferError(f"sending pages: {error}") from error

    def receive(self, tensors: Sequence[Tensor]) -> None:
        """Fill each contiguous tensor with one message of its size. Raises `TransferError`."""
        try:
            works = [self._backend.recv([tensor], self._peer, _TAG) for tensor in tensors]
            self._wait(works)
        except RuntimeError as error:
            raise TransferError(f"receiving pages: {error}") from error

    def send_bytes(self, data: bytes) -> None:
        self.finish(self.post([self.message(data)]))

    def message(self, data: bytes) -> Tensor:
        """`data` as a tensor to post."""
        return torch.from_numpy(np.frombuffer(bytearray(data), np.uint8)).to(self.device)

    def receive_bytes(self, num_bytes: int) -> bytes:
        tensor = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        self.receive([tensor])
        return tensor.cpu().numpy().tobytes()

    def close(self) -> None:
        self._backend.shutdown()

    def _wait(self, works: Sequence[Work]) -> None:
        for work in works:
            work.wait(self._timeout)
        if self.device.type == "cuda":
            # NCCL's wait only orders the stream; "complete" means that the bytes are there.
            torch.cuda.synchronize(self.device)


def _open_backend(store: Store, rank: int, device: torch.device, timeout: timedelta) -> _Backend:
    if device.type == "cpu":
        return cast("_Backend", ProcessGroupGloo(store, rank, 2, timeout))
    # Imported here because a CPU build of torch has no NCCL.
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout  # pyright: ignore[reportPrivateUsage]  # torch offers no other way
    return cast("_Backend", ProcessGroupNCCL(store, rank, 2, options))
