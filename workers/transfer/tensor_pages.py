"""The pools of an engine's ranks as tensors of bytes, on any device."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pageray.cluster.errors import ConfigError
from pageray.cluster.page_layout import HeadSlice, PoolLayout, head_slices
from pageray.workers.transfer.mapped_pages import ByteArray, check_span
from pageray.workers.transfer.page_write import PageSpan, PageWrite


class TensorPages:
    """By rank, `[num_blocks + 1, num_layers, 2, kv_heads_of_the_rank, head_bytes]` of uint8."""

    def __init__(self, layout: PoolLayout, tensors: Sequence[Tensor]) -> None:
        """Over contiguous pool tensors (`PagePool.tensor`), one per rank, on one device."""
        self.layout = layout
        self._ranks = tuple(
            tensor.view(torch.uint8).view(-1, layout.num_layers, 2, end - start, layout.head_bytes)
            for tensor, (start, end) in zip(tensors, layout.shards, strict=True)
        )
        self.num_blocks = self._ranks[0].shape[0] - 1
        self.device = self._ranks[0].device

    def rank(self, rank: int) -> Tensor:
        """All pages of one rank."""
        return self._ranks[rank]

    def part(self, rank: int, span: PageSpan) -> Tensor:
        """The bytes of `span` on one rank, a flat view."""
        return self._ranks[rank][span.block, span.layer_start : span.layer_end].view(-1)

    def parts(self, span: PageSpan) -> list[ByteArray]:
        """As arrays, on CPU only: raises `ConfigError` on CUDA, where checksums must be off."""
        return as_arrays([self.part(rank, span) for rank in range(len(self._ranks))])


class OutgoingTensors:
    """A source's pages in the destination's form; the twin of `OutgoingPages` on tensors."""

    def __init__(self, pages: TensorPages, destination: PoolLayout) -> None:
        """Raises ValueError when the two layouts are not of one model."""
        slices = head_slices(pages.layout, destination)
        self.pages = pages
        self.destination = destination
        self._slices_of = [
            [part for part in slices if part.destination_rank == rank]
            for rank in range(len(destination.shards))
        ]

    def check(self, writes: Sequence[PageWrite]) -> None:
        """ValueError when the source has not all that `writes` name; to be called before `parts`."""
        for write in writes:
            check_span(self.pages, write.source_span(self.pages.layout.num_layers))

    def parts(self, write: PageWrite) -> list[Tensor]:
        """In wire order, flat and contiguous: views where the shards agree, else copies."""
        span = write.source_span(self.pages.layout.num_layers)
        return [self._part(slices, span) for slices in self._slices_of]

    def _part(self, slices: Sequence[HeadSlice], span: PageSpan) -> Tensor:
        """One destination rank's bytes: its slices are in order of head and leave no gap."""
        block, start, end = span
        pieces = [
            self.pages.rank(part.source_rank)[block, start:end].narrow(
                2, part.source_head, part.num_heads
            )
            for part in slices
        ]
        return pieces[0].reshape(-1) if len(pieces) == 1 else torch.cat(pieces, dim=2).view(-1)


def as_arrays(tensors: Sequence[Tensor]) -> list[ByteArray]:
    """Views of CPU tensors; `ConfigError` for others."""
    if any(tensor.device.type != "cpu" for tensor in tensors):
        raise ConfigError("pages on a CUDA device have no checksums; turn them off.")
    return [np.asarray(tensor.numpy(), np.uint8) for tensor in tensors]
