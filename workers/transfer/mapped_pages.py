"""The pools of all ranks of an engine on this host, as arrays of bytes in this process."""

import mmap
import os
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pageray.cluster.page_layout import PoolLayout
from pageray.workers.transfer.page_write import PageSpan

ByteArray = NDArray[np.uint8]
Memory = mmap.mmap | memoryview | bytearray


class PoolShape(Protocol):
    """How the pools of one engine are laid out."""

    @property
    def layout(self) -> PoolLayout: ...

    @property
    def num_blocks(self) -> int: ...


class EnginePages(PoolShape, Protocol):
    """The pools of all ranks of one engine, wherever their bytes are."""

    def parts(self, span: PageSpan) -> list[ByteArray]:
        """The bytes of `span` in wire order: by rank, each a flat contiguous view."""
        ...


class MappedPages:
    """By rank, `[num_blocks + 1, num_layers, 2 (K, V), kv_heads_of_the_rank, head_bytes]` of uint8.

    Views given out keep the memory mapped, also after `close`.
    """

    def __init__(self, layout: PoolLayout, num_blocks: int, buffers: Sequence[Memory]) -> None:
        """Over writable `buffers`, one per rank. ValueError when their sizes do not fit."""
        if len(buffers) != len(layout.shards):
            raise ValueError(f"{len(buffers)} pools for {len(layout.shards)} ranks.")
        self.layout = layout
        self.num_blocks = num_blocks
        self._ranks: tuple[ByteArray, ...] = tuple(
            _as_pages(layout, num_blocks, rank, buffer) for rank, buffer in enumerate(buffers)
        )

    @classmethod
    def open(cls, layout: PoolLayout, paths: Sequence[str]) -> "MappedPages":
        """Map the pools that other processes of this host share (`PagePool.share_path`), by rank.

        The number of blocks is what the files hold. Raises OSError when a process is gone,
        ValueError when a file is no pool of this layout or the ranks differ in blocks.
        """
        if len(paths) != len(layout.shards):
            raise ValueError(f"{len(paths)} pools for {len(layout.shards)} ranks.")
        mappings = [_map(path) for path in paths]
        blocks = {
            divmod(len(mapping), layout.page_bytes(rank)) for rank, mapping in enumerate(mappings)
        }
        num_pages, rest = min(blocks)
        if len(blocks) != 1 or rest or num_pages < 2:
            sizes = [len(mapping) for mapping in mappings]
            pages = [layout.page_bytes(rank) for rank in range(len(paths))]
            raise ValueError(f"pools of {sizes} bytes do not hold equally many pages of {pages}.")
        return cls(layout, num_pages - 1, mappings)

    def rank(self, rank: int) -> ByteArray:
        """All pages of one rank. IndexError after `close`."""
        return self._ranks[rank]

    def parts(self, span: PageSpan) -> list[ByteArray]:
        block, start, end = span
        return [pages[block, start:end].reshape(-1) for pages in self._ranks]

    def close(self) -> None:
        """Let go of the memory; it is unmapped with the last view of it."""
        self._ranks = ()


def check_span(pages: PoolShape, span: PageSpan) -> None:
    """ValueError unless `span` lies in the pools. The null block is nobody's to read or write."""
    if not 1 <= span.block <= pages.num_blocks:
        raise ValueError(f"block {span.block} is not one of 1 .. {pages.num_blocks}.")
    num_layers = pages.layout.num_layers
    if not 0 <= span.layer_start < span.layer_end <= num_layers:
        raise ValueError(f"layers {span.layer_start} .. {span.layer_end} of {num_layers}.")


def wire_bytes(layout: PoolLayout, span: PageSpan) -> int:
    """How many bytes `span` is over all ranks of `layout`."""
    num_heads = sum(end - start for start, end in layout.shards)
    return (span.layer_end - span.layer_start) * 2 * num_heads * layout.head_bytes


def _map(path: str) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(fd, 0)
    finally:
        os.close(fd)


def _as_pages(layout: PoolLayout, num_blocks: int, rank: int, buffer: Memory) -> ByteArray:
    needed = (num_blocks + 1) * layout.page_bytes(rank)
    flat = np.frombuffer(buffer, np.uint8)
    if flat.nbytes != needed:
        raise ValueError(
            f"the pool of rank {rank} has {flat.nbytes} bytes; {num_blocks} blocks need {needed}."
        )
    start, end = layout.shards[rank]
    return flat.reshape(num_blocks + 1, layout.num_layers, 2, end - start, layout.head_bytes)
