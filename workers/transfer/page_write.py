"""One write of a transfer: which block goes where, whole or some of its layers.

A write covers all ranks and heads of its block: it is one *logical* write, and a transfer is
complete when each of its writes has been counted once.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from pageray.cluster.ids import BlockId


class PageSpan(NamedTuple):
    """Layers `layer_start` .. `layer_end` - 1 of one block, on all ranks of its engine."""

    block: BlockId
    layer_start: int
    layer_end: int


class PageWrite(msgspec.Struct, frozen=True, array_like=True):
    """`source_block` of the holder to `destination_block` of the engine that asked."""

    index: int
    """Position in the transfer, from 0; a repeated index is the same write again."""
    source_block: BlockId
    destination_block: BlockId
    layer_start: int = 0
    layer_end: int | None = None
    """One past the last layer; None: up to the last one."""

    def source_span(self, num_layers: int) -> PageSpan:
        return PageSpan(self.source_block, self.layer_start, self._end(num_layers))

    def destination_span(self, num_layers: int) -> PageSpan:
        return PageSpan(self.destination_block, self.layer_start, self._end(num_layers))

    def _end(self, num_layers: int) -> int:
        return num_layers if self.layer_end is None else self.layer_end


def plan_writes(
    source_blocks: Sequence[BlockId],
    destination_blocks: Sequence[BlockId],
    layer_ranges: Sequence[tuple[int, int]] | None = None,
) -> list[PageWrite]:
    """The writes of one transfer, numbered as `Arrivals.expect` numbers what it expects.

    Every block, for each of `layer_ranges` (start, end) in turn; None means whole pages. Raises
    ValueError when the two lists differ in length.
    """
    if len(source_blocks) != len(destination_blocks):
        raise ValueError(
            f"{len(source_blocks)} source blocks for {len(destination_blocks)} destination blocks."
        )
    pairs = list(zip(source_blocks, destination_blocks, strict=True))
    ranges = [(0, None)] if layer_ranges is None else layer_ranges
    return [
        PageWrite(number * len(pairs) + position, source, destination, start, end)
        for number, (start, end) in enumerate(ranges)
        for position, (source, destination) in enumerate(pairs)
    ]


def plan_spans(
    blocks: Sequence[BlockId], num_layers: int, layer_ranges: Sequence[tuple[int, int]] | None
) -> list[PageSpan]:
    """By index: where each write of `plan_writes` with these destination blocks ends up."""
    ranges = [(0, num_layers)] if layer_ranges is None else layer_ranges
    return [PageSpan(block, start, end) for start, end in ranges for block in blocks]
