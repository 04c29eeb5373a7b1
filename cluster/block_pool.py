"""The block pool of one engine: who holds which block, and what may be reused.

    free --allocate--> owned (ref >= 1) --release--> cached (ref 0, key kept) --evict--> free
                         |  ^                          |
                         |  +---------acquire----------+
                         +-- fork: acquire; write while shared => copy first

Only this class changes reference counts, and `release` is the only way down. Pins (copies,
transfers, disk I/O that still read a block) are counted apart: a block is reusable only at
ref 0 and pins 0.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from pageray.cluster.block_events import BlockEventLog
from pageray.cluster.block_keys import BlockContent
from pageray.cluster.coordinator.messages import BlockEvent
from pageray.cluster.ids import NULL_BLOCK, BlockId, BlockKey
from pageray.cluster.prefix_index import PrefixIndex, Publication, PublicationId


class BlockPool:
    """Blocks 1 .. `num_blocks`; block 0 is the null block and stands outside the count.

    `events` hears which keys are published and which are no more.
    """

    def __init__(self, num_blocks: int, events: BlockEventLog | None = None) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; a pool has at least one block.")
        self._num_blocks = num_blocks
        self._refs = [0] * (num_blocks + 1)
        self._pins = [0] * (num_blocks + 1)
        # Popped from the end, so that a fresh pool hands out 1, 2, 3, ...
        self._free = [BlockId(i) for i in range(num_blocks, 0, -1)]
        # Least recently released first. Tail blocks are released before their prefix, so the
        # front is always a leaf: eviction never cuts a chain in the middle.
        self._cached: OrderedDict[BlockId, None] = OrderedDict()
        self._index = PrefixIndex()
        self._events = events
        self.num_evictions = 0

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out now: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_held(self) -> int:
        """Blocks with a reference or a pin."""
        return self._num_blocks - self.num_available

    @property
    def num_pinned(self) -> int:
        return sum(pins > 0 for pins in self._pins)

    def allocate(self, count: int) -> list[BlockId] | None:
        """`count` blocks with ref 1 each, owned by the caller, or None (and nothing changed)."""
        if count > self.num_available:
            return None
        blocks: list[BlockId] = []
        for _ in range(count):
            if self._free:
                block_id = self._free.pop()
            else:
                block_id, _ = self._cached.popitem(last=False)
                self._forget(block_id)
                self.num_evictions += 1
            self._refs[block_id] = 1
            blocks.append(block_id)
        return blocks

    def num_reusable(self, blocks: Iterable[BlockId]) -> int:
        """How many of these blocks acquiring would take away from `num_available`."""
        return sum(self._is_reusable(block_id) for block_id in blocks)

    def acquire(self, blocks: Iterable[BlockId]) -> None:
        """One more reference to each block, for a hit (published) or a fork (owned)."""
        for block_id in blocks:
            if self._is_reusable(block_id):
                self._cached.pop(block_id)  # KeyError: a free block cannot be acquired
            self._refs[block_id] += 1

    def release(self, blocks: SequenceOf[BlockId]) -> None:
        """Give back one reference to each block of a table, in table order.

        Works tail first. Raises ValueError on a block that nobody holds.
        """
        for block_id in reversed(blocks):
            if self._refs[block_id] < 1:
                raise ValueError(f"block {block_id} was released but nobody holds it.")
            self._refs[block_id] -= 1
            self._settle(block_id)

    def pin(self, block_id: BlockId) -> None:
        """Keep a held or cached block from being reused until `unpin`."""
        if self._is_reusable(block_id):
            self._cached.pop(block_id)
        self._pins[block_id] += 1

    def unpin(self, block_id: BlockId) -> None:
        """Raises ValueError on a block without a pin."""
        if self._pins[block_id] < 1:
            raise ValueError(f"block {block_id} was unpinned but has no pin.")
        self._pins[block_id] -= 1
        self._settle(block_id)

    def is_writable(self, block_id: BlockId) -> bool:
        """Whether its single holder may write into it in place.

        A published block never: whoever hits it later trusts its bytes.
        """
        return self._refs[block_id] == 1 and self._index.of_block(block_id) is None

    def publish(
        self, block_id: BlockId, content: BlockContent, parent_id: PublicationId
    ) -> PublicationId | None:
        """Let others hit a full block whose bytes are written and acknowledged.

        Returns the publication to use as parent of the next block, or None after a digest
        collision, when nothing further down the chain may be published. Raises ValueError for a
        block that nobody holds, or that is published with other content already.
        """
        if self._refs[block_id] < 1:
            raise ValueError(f"block {block_id} was published but nobody holds it.")
        already = self._index.of_block(block_id)
        if already is not None and already.content != content:
            raise ValueError(f"block {block_id} is published already, with other content.")
        publication_id, displaced = self._index.insert(block_id, content, parent_id)
        if displaced is not None and self._is_reusable(displaced):
            del self._cached[displaced]
            self._free.append(displaced)
        is_new = already is None and self._index.of_block(block_id) is not None
        if self._events is not None and is_new and displaced is None:
            self._events.stored(content.key)
        return publication_id

    def find(self, content: BlockContent, parent_id: PublicationId) -> Publication | None:
        """The published block with this content on this prefix, or None. Takes no reference."""
        return self._index.find(content, parent_id)

    def clear_cache(self) -> None:
        """Forget every published block; those that are held stay with their holders."""
        for block_id in range(1, self._num_blocks + 1):
            if self._index.of_block(BlockId(block_id)) is not None:
                self._index.remove(BlockId(block_id))
        self._free.extend(self._cached)
        self._cached.clear()
        if self._events is not None:
            self._events.cleared()

    def take_events(self) -> tuple[BlockEvent, ...] | None:
        """What changed since the last call; None when that is not known any more."""
        return None if self._events is None else self._events.take()

    def published_keys(self) -> tuple[BlockKey, ...]:
        """Every key that `find` could hit now."""
        return self._index.keys()

    def check_invariants(self, tables: Iterable[SequenceOf[BlockId]]) -> None:
        """Assert conservation: `tables` are all block tables that exist, each holding one
        reference to each of its entries."""
        expected = Counter(block_id for table in tables for block_id in table)
        assert expected[NULL_BLOCK] == 0, "a block table names the null block"
        for block_id in range(1, self._num_blocks + 1):
            refs = self._refs[block_id]
            assert refs == expected[BlockId(block_id)], (
                f"block {block_id}: ref {refs}, in tables {expected[BlockId(block_id)]}"
            )
            assert self._pins[block_id] >= 0
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & cached, f"free and cached at once: {free & cached}"
        reusable = {
            block_id
            for block_id in map(BlockId, range(1, self._num_blocks + 1))
            if self._refs[block_id] == 0 and self._pins[block_id] == 0
        }
        assert free | cached == reusable, (free | cached) ^ reusable
        assert all(self._index.of_block(block_id) is None for block_id in free)
        assert all(self._index.of_block(block_id) is not None for block_id in cached)
        self._index.check_invariants()

    def _forget(self, block_id: BlockId) -> None:
        publication = self._index.remove(block_id)
        if self._events is not None:
            self._events.removed(publication.content.key)

    def _is_reusable(self, block_id: BlockId) -> bool:
        return self._refs[block_id] == 0 and self._pins[block_id] == 0

    def _settle(self, block_id: BlockId) -> None:
        if not self._is_reusable(block_id):
            return
        if self._index.of_block(block_id) is None:
            self._free.append(block_id)
        else:
            self._cached[block_id] = None
