"""One push: a run of blocks into another engine's pool, from the cache or as they are computed."""

import time
from collections.abc import Callable, Iterator

from pageray.cluster.ids import BlockId
from pageray.workers.engine_pages import EnginePages
from pageray.workers.page_service.layer_groups import layer_groups
from pageray.workers.page_service.messages import PushedPart, PushEnd, PushMessage, PushRequest
from pageray.workers.page_service.prefill_job import PrefillJob
from pageray.workers.transfer.page_write import PageWrite
from pageray.workers.transfer.page_writer import TransferStoppedError

BATCH_WRITES = 16
"""Writes between two messages to the destination."""
STEP_WAIT_S = 0.1
LAYER_POLL_S = 0.5e-3
"""A layer of a large prefill takes tens of milliseconds."""

SendWrites = Callable[[list[PageWrite]], tuple[int, ...]]
"""Carries out writes and returns their checksums for the destination to verify, if it must."""


class Push:
    """Generators of the messages of one push; each may be iterated once."""

    def __init__(self, request: PushRequest, pages: EnginePages, send: SendWrites) -> None:
        self._request = request
        self._pages = pages
        self._send = send
        self._num_wanted = len(request.destination_blocks)
        num_layers = request.destination.layout.num_layers
        self._groups = layer_groups(num_layers, request.num_layer_groups)

    def what_is_here(self) -> Iterator[PushMessage]:
        """What is published here now, from the first wanted block on without a hole."""
        num_pushed = 0
        for message, num_blocks in self._push_published(0):
            num_pushed += num_blocks
            yield message
        yield PushEnd(num_pushed)

    def while_computing(
        self, job: PrefillJob, is_wanted: Callable[[], bool]
    ) -> Iterator[PushMessage]:
        """Blocks step by step, and within a step layer by layer, until the prompt is computed."""
        num_pushed = 0
        try:
            while num_pushed < self._num_wanted:
                # Asked before looking: what is computed after the look is seen by the next one.
                is_over = job.is_over
                before = num_pushed
                for message, num_blocks in self._push_published(num_pushed):
                    num_pushed += num_blocks
                    yield message
                for message, num_blocks in self._push_filling(job, num_pushed, is_wanted):
                    num_pushed += num_blocks
                    yield message
                if num_pushed == before:
                    if is_over:
                        break
                    if not is_wanted():
                        raise TransferStoppedError("The destination has gone.")
                    self._pages.wait_for_step(STEP_WAIT_S)
        finally:
            job.cancel()
        num_hits = job.num_cached_tokens // self._request.destination.block_size
        num_computed = num_pushed - max(0, num_hits - self._request.first)
        yield PushEnd(num_pushed, num_computed_blocks=max(0, num_computed))

    def _push_filling(
        self, job: PrefillJob, num_pushed: int, is_wanted: Callable[[], bool]
    ) -> Iterator[tuple[PushedPart, int]]:
        """As `_push_published`, for blocks that the step in flight is filling: each group of
        layers as soon as its KV is written.

        The tokens are those that were asked for, so the bytes are right whatever becomes of the
        sequence; the destination uses none of them before the end.
        """
        filling = self._pages.pin_filling(job.request_id)
        if filling is None:
            return
        try:
            skipped = self._request.first + num_pushed - filling.first
            blocks = filling.block_ids[max(0, skipped) :][: self._num_wanted - num_pushed]
            if skipped < 0 or not blocks:
                return
            for group, (_, end) in enumerate(self._groups):
                while self._pages.num_layers_written(filling.step_id) < end:
                    if not is_wanted():
                        raise TransferStoppedError("The destination has gone.")
                    time.sleep(LAYER_POLL_S)
                for start in range(0, len(blocks), BATCH_WRITES):
                    batch = [
                        self._write_of(group, block_id, position)
                        for position, block_id in enumerate(
                            blocks[start : start + BATCH_WRITES], start=num_pushed + start
                        )
                    ]
                    part = PushedPart(tuple(write.index for write in batch), self._send(batch))
                    yield part, len(batch) if group == len(self._groups) - 1 else 0
        finally:
            self._pages.unpin(filling)

    def _push_published(self, num_pushed: int) -> Iterator[tuple[PushedPart, int]]:
        """(message, whole blocks it completes) for what is published beyond `num_pushed`."""
        request = self._request
        export = self._pages.open_export(request.contents, request.first + num_pushed)
        if export is None:
            return
        try:
            blocks = export.block_ids[: self._num_wanted - num_pushed]
            writes = [
                write
                for position, block_id in enumerate(blocks, start=num_pushed)
                for write in self._writes_of(block_id, position)
            ]
            size = max(1, BATCH_WRITES // len(self._groups)) * len(self._groups)
            for start in range(0, len(writes), size):
                batch = writes[start : start + size]
                checksums = self._send(batch)
                part = PushedPart(tuple(write.index for write in batch), checksums)
                yield part, len(batch) // len(self._groups)
        finally:
            self._pages.close_export(export.export_id)

    def _writes_of(self, block_id: BlockId, position: int) -> Iterator[PageWrite]:
        """The writes of the wanted block number `position`."""
        for group in range(len(self._groups)):
            yield self._write_of(group, block_id, position)

    def _write_of(self, group: int, block_id: BlockId, position: int) -> PageWrite:
        """Numbered as `Arrivals` expects it."""
        start, end = self._groups[group]
        return PageWrite(
            group * self._num_wanted + position,
            block_id,
            self._request.destination_blocks[position],
            start,
            end,
        )
