"""Source end of pages through a process group (`process_group.py`)."""

from collections.abc import Sequence

from torch import Tensor
from torch.distributed import Work  # pyright: ignore[reportPrivateImportUsage]

from pageray.cluster.ids import TransferId
from pageray.workers.transfer.checksum import checksum_of
from pageray.workers.transfer.frame_batches import cut_into_frames, header_of
from pageray.workers.transfer.frames import REPLY_BYTES, FrameError, Status, parse_reply
from pageray.workers.transfer.page_write import PageWrite
from pageray.workers.transfer.page_writer import (
    ShouldStop,
    TransferError,
    TransferStoppedError,
    never,
)
from pageray.workers.transfer.process_group import NOTICE_BYTES, PointToPoint
from pageray.workers.transfer.tensor_pages import OutgoingTensors, as_arrays


class PageGroupWriter:
    """A `PageWriter` to the one peer of `group`."""

    def __init__(
        self, outgoing: OutgoingTensors, group: PointToPoint, *, with_checksums: bool = True
    ) -> None:
        """`with_checksums` must be off on CUDA."""
        self._outgoing = outgoing
        self._group = group
        self._with_checksums = with_checksums

    def write(
        self, transfer_id: TransferId, writes: Sequence[PageWrite], should_stop: ShouldStop = never
    ) -> list[int]:
        """After a `TransferError` that is no stop, the group is of no use any more."""
        self._outgoing.check(writes)
        checksums: list[int] = []
        batches = cut_into_frames(self._outgoing.destination, writes)
        in_flight: list[Work] = []
        for number, batch in enumerate(batches, start=1):
            if should_stop():
                self._group.finish(in_flight)
                self._group.send_bytes(bytes(NOTICE_BYTES))
                raise TransferStoppedError(f"transfer {transfer_id} was stopped.")
            messages, batch_checksums = self._frame(transfer_id, batch, number == len(batches))
            posted = self._group.post(messages)
            # One frame ahead: the next one is prepared while this one is on its way.
            self._group.finish(in_flight)
            in_flight = posted
            checksums += batch_checksums
        self._group.finish(in_flight)
        if writes:
            self._read_reply(transfer_id)
        return checksums

    def close(self) -> None:
        self._group.close()

    def _frame(
        self, transfer_id: TransferId, batch: Sequence[PageWrite], is_last: bool
    ) -> tuple[list[Tensor], list[int]]:
        """The messages of one frame, and the checksums of its writes."""
        parts = [self._outgoing.parts(write) for write in batch]
        checksums = (
            [checksum_of(as_arrays(part)) for part in parts] if self._with_checksums else None
        )
        notice = header_of(
            self._outgoing.destination, transfer_id, batch, checksums, wants_reply=is_last
        )
        payload = [tensor for part in parts for tensor in part]
        return [self._group.message(notice.ljust(NOTICE_BYTES, b"\0")), *payload], checksums or []

    def _read_reply(self, transfer_id: TransferId) -> None:
        try:
            status, replied_id = parse_reply(self._group.receive_bytes(REPLY_BYTES))
        except FrameError as error:
            raise TransferError(f"transfer {transfer_id}: {error}") from error
        if replied_id != transfer_id or status is not Status.COUNTED:
            raise TransferError(f"transfer {transfer_id}: answer {status.name} for {replied_id}.")
