"""The cluster's block table: which engine holds which block, for millions of blocks.

    hint (60 bits of the block key) --> holders (bit i set: incarnation i holds it)

An *incarnation* is one uninterrupted account of one engine's blocks: an engine gets a new one with
every epoch, snapshot and cleared cache. Dropping one only marks its bit as dead, whatever it held;
`sweep` takes dead bits out of the table a few entries at a time, and a bit is handed out again
only after a whole sweep has cleared it.

Answers are hints. Two keys that agree in 60 bits count as one, and events may be on their way; the
engine compares keys and tokens before it uses a block. A lookup relies on chains being held from
their root on (eviction takes leaves first): an engine that had lost a block in the middle of a
chain could be credited with blocks behind the hole, up to the last one it still has.
"""

import heapq
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from typing import NewType

from pageray.cluster.ids import BlockKey

IncarnationId = NewType("IncarnationId", int)
"""Small, so that holder masks stay short: the lowest number that is free."""

NUM_SHARDS = 1024
"""A shard of a full table (10 million keys) is swept in about a millisecond; with more shards, a
lookup finds fewer of their headers in the processor's cache."""
HINT_MASK = (1 << 60) - 1
"""Two digits of a Python int: 32 bytes an object."""
_MAX_INTERNED = 1 << 16


class ClusterBlockTable:
    """Memory per key: one 60-bit int, one dict entry, and a reference to its holders. A single
    holder is one int that all its keys share; the int for a set of holders is shared too, as long
    as the set is among those lately seen."""

    def __init__(self) -> None:
        self._shards: list[dict[int, int]] = [{} for _ in range(NUM_SHARDS)]
        self._bits: dict[IncarnationId, int] = {}
        self._num_held: dict[IncarnationId, int] = {}
        self._live = 0
        self._dead = 0
        self._num_incarnations = 0
        self._free: list[IncarnationId] = []
        # Dead bits that the sweep in progress takes away: shards before the position are clean.
        self._sweeping = 0
        self._sweep_position = 0
        self._interned: dict[int, int] = {}

    @property
    def num_entries(self) -> int:
        """(incarnation, key) pairs of the incarnations that are open."""
        return sum(self._num_held.values())

    @property
    def num_keys(self) -> int:
        """Distinct keys, with those that only the dead held until they are swept."""
        return sum(map(len, self._shards))

    @property
    def has_dead(self) -> bool:
        return self._dead != 0

    def open(self) -> IncarnationId:
        """A new incarnation, which holds nothing."""
        if self._free:
            incarnation = heapq.heappop(self._free)
        else:
            incarnation = IncarnationId(self._num_incarnations)
            self._num_incarnations += 1
        bit = 1 << incarnation
        self._bits[incarnation] = bit
        self._num_held[incarnation] = 0
        self._live |= bit
        return incarnation

    def drop(self, incarnation: IncarnationId) -> None:
        """Forget all an incarnation holds, at once; its id is void. KeyError if it is not open."""
        bit = self._bits.pop(incarnation)
        self._live &= ~bit
        if self._num_held.pop(incarnation):
            self._dead |= bit
        else:
            heapq.heappush(self._free, incarnation)

    def store(self, incarnation: IncarnationId, keys: Iterable[BlockKey]) -> None:
        """It holds these keys from now on; those it held already change nothing."""
        bit, shards, interned = self._bits[incarnation], self._shards, self._interned
        if len(interned) > _MAX_INTERNED:
            interned.clear()
        num_added = 0
        for key in keys:
            hint = int.from_bytes(key[-8:], "big") & HINT_MASK
            shard = shards[hint % NUM_SHARDS]
            holders = shard.get(hint)
            if holders is None:
                shard[hint] = bit
            elif holders & bit:
                continue
            else:
                holders |= bit
                shard[hint] = interned.setdefault(holders, holders)
            num_added += 1
        self._num_held[incarnation] += num_added

    def remove(self, incarnation: IncarnationId, keys: Iterable[BlockKey]) -> None:
        """It holds these keys no more; those it did not hold change nothing."""
        bit, shards, interned = self._bits[incarnation], self._shards, self._interned
        num_removed = 0
        for key in keys:
            hint = hint_of(key)
            shard = shards[hint % NUM_SHARDS]
            holders = shard.get(hint, 0)
            if not holders & bit:
                continue
            holders &= ~bit
            if holders:
                shard[hint] = interned.setdefault(holders, holders)
            else:
                del shard[hint]
            num_removed += 1
        self._num_held[incarnation] -= num_removed

    def longest_runs(self, keys: SequenceOf[BlockKey]) -> dict[IncarnationId, int]:
        """For each incarnation that holds `keys[0]`: how many leading keys it holds.

        Along a chain the set of holders only shrinks. Where it is equal at both ends of a range
        it is so in between, so a prompt costs (distinct run lengths) x log(blocks) probes.
        """
        runs: dict[IncarnationId, int] = {}
        shards = self._shards
        # (low, high, holders at low, holders at high); behind the last key nobody holds anything.
        ranges = [(0, len(keys), self._holders(keys[0]), 0)] if keys else []
        while ranges:
            low, high, at_low, at_high = ranges.pop()
            if at_low == at_high:
                continue
            if high - low == 1:
                for incarnation in _incarnations(at_low & ~at_high):
                    runs[incarnation] = high
                continue
            middle = (low + high) // 2
            hint = int.from_bytes(keys[middle][-8:], "big") & HINT_MASK
            # Forced between its neighbours: without the dead, and in case a chain has a hole.
            at_middle = (shards[hint % NUM_SHARDS].get(hint, 0) | at_high) & at_low
            ranges.append((low, middle, at_low, at_middle))
            ranges.append((middle, high, at_middle, at_high))
        return runs

    def longest_runs_linear(self, keys: SequenceOf[BlockKey]) -> dict[IncarnationId, int]:
        """As `longest_runs`, looking at every key: what that must equal, and exact with holes."""
        runs: dict[IncarnationId, int] = {}
        reaching = self._live
        for position, key in enumerate(keys):
            holders = self._holders(key)
            if position:
                runs.update(dict.fromkeys(_incarnations(reaching & ~holders), position))
            reaching &= holders
        runs.update(dict.fromkeys(_incarnations(reaching), len(keys)) if keys else {})
        return runs

    def hints_held(self, incarnation: IncarnationId) -> set[int]:
        """The hints of all keys it holds. Walks the whole table: for tests and inspection."""
        bit = self._bits[incarnation]
        return {hint for shard in self._shards for hint, held in shard.items() if held & bit}

    def sweep(self, max_entries: int) -> None:
        """Take dead entries out of the next shards, looking at about `max_entries`."""
        if not self._sweeping:
            if not self._dead:
                return
            self._sweeping, self._sweep_position = self._dead, 0
        while max_entries > 0 and self._sweep_position < NUM_SHARDS:
            max_entries -= 1 + len(self._shards[self._sweep_position])
            self._sweep_shard(self._sweep_position)
            self._sweep_position += 1
        if self._sweep_position == NUM_SHARDS:
            for incarnation in _incarnations(self._sweeping):
                heapq.heappush(self._free, incarnation)
            self._dead &= ~self._sweeping
            self._sweeping = 0

    def check_invariants(self) -> None:
        """Assert that counts, masks and shards agree. Walks the whole table."""
        counts = dict.fromkeys(self._bits, 0)
        known = self._live | self._dead
        for position, shard in enumerate(self._shards):
            gone = self._sweeping if position < self._sweep_position else 0
            for hint, holders in shard.items():
                assert hint % NUM_SHARDS == position, f"hint {hint:x} in shard {position}"
                assert holders > 0, f"hint {hint:x} is kept, but nobody holds it"
                assert not holders & ~known, f"hint {hint:x} is held by a bit that is free"
                assert not holders & gone, f"shard {position} was swept, but hint {hint:x} was not"
                for incarnation in _incarnations(holders & self._live):
                    counts[incarnation] += 1
        assert counts == self._num_held, (counts, self._num_held)
        assert not self._live & self._dead
        assert not self._sweeping & ~self._dead
        assert sum(self._bits.values()) == self._live
        free = sum(1 << incarnation for incarnation in self._free)
        assert len(set(self._free)) == len(self._free)
        assert free ^ known == (1 << self._num_incarnations) - 1, "a bit is lost or doubled"
        assert not free & known

    def _holders(self, key: BlockKey) -> int:
        hint = hint_of(key)
        return self._shards[hint % NUM_SHARDS].get(hint, 0) & self._live

    def _sweep_shard(self, position: int) -> None:
        shard, sweeping = self._shards[position], self._sweeping
        stale = [(hint, holders) for hint, holders in shard.items() if holders & sweeping]
        for hint, holders in stale:
            kept = holders & ~sweeping
            if kept:
                shard[hint] = self._interned.setdefault(kept, kept)
            else:
                del shard[hint]
        if len(stale) > len(shard):
            # A dict gives memory back only when it is copied.
            self._shards[position] = dict(shard)


def hint_of(key: BlockKey) -> int:
    """The last 60 bits: keys cut short, as in collision tests, keep their differences there."""
    return int.from_bytes(key[-8:], "big") & HINT_MASK


def _incarnations(holders: int) -> Iterator[IncarnationId]:
    """The set bits, lowest first."""
    digits = f"{holders:b}"[::-1]
    position = digits.find("1")
    while position >= 0:
        yield IncarnationId(position)
        position = digits.find("1", position + 1)
