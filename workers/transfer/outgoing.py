"""A source's pages in the form in which the destination keeps them.

Wire order is the destination's order: rank by rank, each rank's layers, K and V, heads. So the
destination never needs to know how the source cuts its heads, and what differs is staged here.
"""

from collections.abc import Sequence

import numpy as np

from pageray.cluster.page_layout import HeadSlice, PoolLayout, head_slices
from pageray.workers.transfer.mapped_pages import ByteArray, MappedPages, check_span
from pageray.workers.transfer.page_write import PageSpan, PageWrite


class OutgoingPages:
    """What to send for a write. For one thread at a time: staging memory is used again."""

    def __init__(self, pages: MappedPages, destination: PoolLayout) -> None:
        """Raises ValueError when the two layouts are not of one model."""
        slices = head_slices(pages.layout, destination)
        self.pages = pages
        self.destination = destination
        self._slices_of = [
            [part for part in slices if part.destination_rank == rank]
            for rank in range(len(destination.shards))
        ]
        self.whole_rank_of = [self._whole_rank(slices) for slices in self._slices_of]
        """By destination rank: the source rank whose page is its page, or None: it is staged."""
        self._staging: dict[tuple[int, int], ByteArray] = {}

    def parts(self, write: PageWrite, place: int = 0) -> list[ByteArray]:
        """The bytes of `write` in wire order: flat contiguous arrays, one per destination rank.

        They are views of the pages where the shards agree, and else staged copies, which stay
        until the next call with the same `place`.
        """
        span = write.source_span(self.pages.layout.num_layers)
        block, start, end = span
        return [
            self._staged(rank, span, place)
            if source_rank is None
            else self.pages.rank(source_rank)[block, start:end].reshape(-1)
            for rank, source_rank in enumerate(self.whole_rank_of)
        ]

    def check(self, writes: Sequence[PageWrite]) -> None:
        """ValueError when the source has not all that `writes` name; to be called before `parts`."""
        for write in writes:
            check_span(self.pages, write.source_span(self.pages.layout.num_layers))

    def stage_in(self, rank: int, memory: ByteArray) -> None:
        """Stage for a destination rank in `memory`, `[places, page bytes]`, instead of its own."""
        for place, page in enumerate(memory):
            self._staging[rank, place] = page

    def _whole_rank(self, slices: Sequence[HeadSlice]) -> int | None:
        """The source rank whose page is, byte for byte, the destination rank's page."""
        start, end = self.pages.layout.shards[slices[0].source_rank]
        is_whole = len(slices) == 1 and slices[0].num_heads == end - start
        return slices[0].source_rank if is_whole else None

    def _staged(self, rank: int, span: PageSpan, place: int) -> ByteArray:
        start, end = self.destination.shards[rank]
        num_layers = span.layer_end - span.layer_start
        shape = (num_layers, 2, end - start, self.destination.head_bytes)
        flat = self._staging_of(rank, place)[: int(np.prod(shape))]
        staged = flat.reshape(shape)
        for part in self._slices_of[rank]:
            source = self.pages.rank(part.source_rank)[
                span.block, span.layer_start : span.layer_end
            ]
            source_end = part.source_head + part.num_heads
            destination_end = part.destination_head + part.num_heads
            staged[:, :, part.destination_head : destination_end] = source[
                :, :, part.source_head : source_end
            ]
        return flat

    def _staging_of(self, rank: int, place: int) -> ByteArray:
        if (rank, place) not in self._staging:
            self._staging[rank, place] = np.empty(self.destination.page_bytes(rank), np.uint8)
        return self._staging[rank, place]
