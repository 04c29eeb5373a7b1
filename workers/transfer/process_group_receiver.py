"""Destination end of pages through a process group (`process_group.py`)."""

import torch
from torch import Tensor

from pageray.workers.transfer.arrivals import Arrivals
from pageray.workers.transfer.frame_receiver import check_frame
from pageray.workers.transfer.frames import (
    HEAD_BYTES,
    RECORD_BYTES,
    FrameHead,
    FrameRecords,
    Status,
    pack_reply,
    parse_head,
    parse_records,
)
from pageray.workers.transfer.landing import Landing
from pageray.workers.transfer.page_write import PageSpan
from pageray.workers.transfer.process_group import NOTICE_BYTES, PointToPoint
from pageray.workers.transfer.tensor_pages import TensorPages


class PageGroupReceiver:
    """Receives into staging memory, and copies into the pages what is still wanted then."""

    def __init__(self, arrivals: Arrivals, pages: TensorPages, group: PointToPoint) -> None:
        """`pages`: the same pools as those of `arrivals`."""
        self._arrivals = arrivals
        self._pages = pages
        self._group = group
        self._staging: dict[tuple[int, int], Tensor] = {}

    def receive(self) -> bool:
        """Serve one `write` of the source; whether it ran to its end and was counted.

        Raises `TransferError` when the source is gone or silent, `FrameError` and
        `UnexpectedWriteError` when it must not be listened to: the group is then of no use.
        """
        status = Status.COUNTED
        while True:
            notice = self._group.receive_bytes(NOTICE_BYTES)
            if not any(notice):
                return False
            head = parse_head(notice[:HEAD_BYTES])
            end = HEAD_BYTES + head.num_writes * RECORD_BYTES
            records = parse_records(notice[HEAD_BYTES:end])
            if not self._receive_frame(head, records):
                status = Status.NOT_COUNTED
            if head.wants_reply:
                self._group.send_bytes(pack_reply(status, head.transfer_id))
                return status is Status.COUNTED

    def _receive_frame(self, head: FrameHead, records: FrameRecords) -> bool:
        check_frame(self._arrivals, head, records)
        landing = self._arrivals.begin(head.transfer_id, records.indices, records.spans)
        staged = [self._stage(place, span) for place, span in enumerate(records.spans)]
        self._group.receive([tensor for parts in staged for tensor in parts])
        if landing is None:
            return False
        for index, span, parts in zip(records.indices, records.spans, staged, strict=True):
            if index in landing.fresh and not self._copy(landing, span, parts):
                return False
        return landing.finish(records.checksums if self._arrivals.with_checksums else None)

    def _copy(self, landing: Landing, span: PageSpan, parts: list[Tensor]) -> bool:
        with landing.permit() as is_granted:
            if is_granted:
                for rank, part in enumerate(parts):
                    self._pages.part(rank, span).copy_(part)
                if self._group.device.type == "cuda":
                    torch.cuda.synchronize(self._group.device)
        return is_granted

    def _stage(self, place: int, span: PageSpan) -> list[Tensor]:
        layout = self._pages.layout
        num_layers = span.layer_end - span.layer_start
        staged: list[Tensor] = []
        for rank in range(len(layout.shards)):
            page_bytes = layout.page_bytes(rank)
            if (place, rank) not in self._staging:
                self._staging[place, rank] = torch.empty(
                    page_bytes, dtype=torch.uint8, device=self._group.device
                )
            staged.append(
                self._staging[place, rank][: page_bytes // layout.num_layers * num_layers]
            )
        return staged
