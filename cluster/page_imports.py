"""Blocks of this engine that another one is writing into.

    begin --> open --finish--> published, released (hits for anyone)
                |
                +--abort--> quarantined --settle--> released, unpublished

A quarantined block belongs to nobody and is reused by nobody: its old writer may still be at
work. `settle` says that this cannot be any more: the source has acknowledged, or it is gone.
"""

import enum
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from pageray.cluster.block_keys import BlockContent
from pageray.cluster.block_pool import BlockPool
from pageray.cluster.ids import BlockId, TransferId
from pageray.cluster.prefix_index import NO_PARENT, PublicationId
from pageray.cluster.prefix_run import find_run


class ImportState(enum.Enum):
    OPEN = "open"
    QUARANTINED = "quarantined"


@dataclass(slots=True)
class Import:
    """`table` holds one reference to each block: first what was here already, then the blocks
    being written, whose contents are `contents`."""

    transfer_id: TransferId
    table: list[BlockId]
    num_local: int
    parent_id: PublicationId
    contents: tuple[BlockContent, ...]
    state: ImportState = ImportState.OPEN

    @property
    def block_ids(self) -> list[BlockId]:
        """The blocks to be written, in order of the chain."""
        return self.table[self.num_local :]


class PageImports:
    """Not thread-safe."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._imports: dict[TransferId, Import] = {}

    def __len__(self) -> int:
        return len(self._imports)

    @property
    def num_quarantined(self) -> int:
        """Imports whose writers have not been heard of yet."""
        return sum(each.state is ImportState.QUARANTINED for each in self._imports.values())

    def begin(
        self, transfer_id: TransferId, contents: SequenceOf[BlockContent], num_spare: int
    ) -> Import | None:
        """Take blocks for the part of the chain `contents` that is not published here.

        None when that is empty, or needs more than `num_spare` blocks: whatever the engine's own
        sequences will need is not for visitors. Raises ValueError on a transfer id in use.
        """
        if transfer_id in self._imports:
            raise ValueError(f"transfer {transfer_id} has begun already.")
        hits = find_run(self._pool, contents)
        missing = tuple(contents[len(hits) :])
        num_needed = len(missing) + self._pool.num_reusable(hit.block_id for hit in hits)
        if not missing or num_needed > num_spare:
            return None
        table = [hit.block_id for hit in hits]
        self._pool.acquire(table)
        blocks = self._pool.allocate(len(missing))
        if blocks is None:
            self._pool.release(table)
            return None
        begun = Import(
            transfer_id=transfer_id,
            table=table + blocks,
            num_local=len(hits),
            parent_id=hits[-1].publication_id if hits else NO_PARENT,
            contents=missing,
        )
        self._imports[transfer_id] = begun
        return begun

    def finish(self, transfer_id: TransferId, num_arrived: int) -> int:
        """Publish the first `num_arrived` blocks, whose bytes are here and verified; release all.

        Nothing may be written any more, not even to the blocks after them. Returns how many were
        published (fewer after a digest collision).
        """
        done = self._take(transfer_id, ImportState.OPEN)
        parent_id, num_published = done.parent_id, 0
        for block_id, content in zip(done.block_ids[:num_arrived], done.contents, strict=False):
            publication_id = self._pool.publish(block_id, content, parent_id)
            if publication_id is None:
                break
            parent_id = publication_id
            num_published += 1
        self._pool.release(done.table)
        return num_published

    def abort(self, transfer_id: TransferId) -> None:
        """Give the transfer up while its writer may still be writing."""
        self._imports[transfer_id].state = ImportState.QUARANTINED

    def settle(self, transfer_id: TransferId) -> None:
        """The writer of an aborted transfer has stopped for good."""
        self._pool.release(self._take(transfer_id, ImportState.QUARANTINED).table)

    def cache_was_cleared(self) -> None:
        """The publications that the open imports hang from are gone: publish none of them."""
        for each in self._imports.values():
            each.contents = ()

    def tables(self) -> Iterator[list[BlockId]]:
        """Block tables, for the pool's count of references."""
        for each in self._imports.values():
            yield each.table

    def _take(self, transfer_id: TransferId, expected: ImportState) -> Import:
        found = self._imports[transfer_id]
        if found.state is not expected:
            raise ValueError(f"transfer {transfer_id} is {found.state.value}.")
        return self._imports.pop(transfer_id)
