"""Pages of this engine that somebody else is reading: what they are, and that they stay."""

import itertools
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NewType

from pageray.cluster.block_keys import BlockContent
from pageray.cluster.block_pool import BlockPool
from pageray.cluster.ids import BlockId
from pageray.cluster.prefix_run import find_run

ExportId = NewType("ExportId", int)


@dataclass(frozen=True, kw_only=True)
class Export:
    """Blocks `first .. first + len(block_ids)` of a chain, pinned until the export is closed."""

    export_id: ExportId
    block_ids: tuple[BlockId, ...]


class PageExports:
    """Pins published blocks for readers. Not thread-safe."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._open: dict[ExportId, Export] = {}
        self._ids = itertools.count(1)

    def __len__(self) -> int:
        return len(self._open)

    def open(self, contents: SequenceOf[BlockContent], first: int) -> Export | None:
        """Pin what is published here of `contents[first:]`, from `first` on without a hole.

        `contents` is the whole chain from the root: a block counts only with all before it. None
        when there is nothing; otherwise the caller must `close` the export.
        """
        run = find_run(self._pool, contents)[first:]
        if not run:
            return None
        for publication in run:
            self._pool.pin(publication.block_id)
        export = Export(
            export_id=ExportId(next(self._ids)),
            block_ids=tuple(publication.block_id for publication in run),
        )
        self._open[export.export_id] = export
        return export

    def close(self, export_id: ExportId) -> None:
        """Unpin. Raises KeyError on an export that is not open."""
        for block_id in reversed(self._open.pop(export_id).block_ids):
            self._pool.unpin(block_id)
