import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pageray.cluster.block_keys import BlockContent, BlockHasher, root_key
from pageray.cluster.block_pool import BlockPool
from pageray.cluster.ids import BlockId
from pageray.cluster.prefix_index import NO_PARENT


def contents_of(tokens: list[int], block_size: int = 2) -> list[BlockContent]:
    chain: list[BlockContent] = []
    BlockHasher(root_key("m", "f", block_size), block_size).extend(chain, tokens, "")
    return chain


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(3)
    assert pool.allocate(4) is None
    assert pool.num_available == 3
    assert pool.allocate(3) == [1, 2, 3]
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []


def test_second_release_raises() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(ValueError, match="block 2 was released but nobody holds it"):
        pool.release(blocks)


def test_pinned_block_is_not_reused() -> None:
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.pin(blocks[0])
    pool.release(blocks)
    assert pool.allocate(1) is None
    pool.unpin(blocks[0])
    assert pool.allocate(1) == blocks
    with pytest.raises(ValueError, match="has no pin"):
        pool.unpin(blocks[0])


def test_eviction_takes_the_tail_of_a_chain_before_its_root() -> None:
    pool = BlockPool(3)
    table = pool.allocate(3)
    assert table is not None
    parent = NO_PARENT
    chain = contents_of([1, 2, 3, 4, 5, 6])
    for block_id, content in zip(table, chain, strict=True):
        published = pool.publish(block_id, content, parent)
        assert published is not None
        parent = published
    pool.release(table)
    assert pool.num_cached == 3
    assert pool.allocate(2) == [table[2], table[1]]
    assert pool.num_evictions == 2
    assert pool.find(chain[0], NO_PARENT) is not None


def test_published_block_is_not_writable_even_by_its_only_holder() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    assert blocks is not None
    pool.publish(blocks[0], contents_of([1, 2])[0], NO_PARENT)
    pool.acquire([blocks[1]])
    assert not pool.is_writable(blocks[0])
    assert not pool.is_writable(blocks[1])
    pool.release([blocks[1]])
    assert pool.is_writable(blocks[1])


def test_stale_child_of_an_evicted_parent_is_displaced() -> None:
    """Parent evicted while its child lives on: the child cannot be reached, and must not stand
    in the way of a new chain with the same content."""
    pool = BlockPool(4)
    chain = contents_of([1, 2, 3, 4])
    blocks = pool.allocate(4)
    assert blocks is not None
    first = pool.publish(blocks[0], chain[0], NO_PARENT)
    assert first is not None
    assert pool.publish(blocks[1], chain[1], first) is not None
    pool.release([blocks[0]])
    assert pool.allocate(1) == [blocks[0]]  # evicts the parent
    again = pool.publish(blocks[2], chain[0], NO_PARENT)
    assert again is not None
    assert pool.find(chain[1], again) is None
    child = pool.publish(blocks[3], chain[1], again)
    assert child is not None
    found = pool.find(chain[1], again)
    assert found is not None
    assert found.block_id == blocks[3]
    pool.release([blocks[1]])  # displaced: free at once, not cached
    assert pool.num_cached == 0


class PoolMachine(RuleBasedStateMachine):
    """Random owners who allocate, share, publish, pin and release."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6)
        self.tables: list[list[BlockId]] = []
        self.pins: list[BlockId] = []
        self.serial = 0

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        available = self.pool.num_available
        blocks = self.pool.allocate(count)
        assert (blocks is None) == (count > available)
        if blocks is not None:
            self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        self.pool.acquire(table)
        self.tables.append(list(table))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data(), token=st.integers(0, 2))
    def publish(self, data: st.DataObject, token: int) -> None:
        table = data.draw(st.sampled_from([table for table in self.tables if table]))
        contents = [contents_of([other, other])[0] for other in range(3)]
        published_as = [
            found is not None and found.block_id == table[0]
            for found in (self.pool.find(content, NO_PARENT) for content in contents)
        ]
        if any(published_as) and not published_as[token]:
            with pytest.raises(ValueError, match="with other content"):
                self.pool.publish(table[0], contents[token], NO_PARENT)
        else:
            assert self.pool.publish(table[0], contents[token], NO_PARENT) is not None

    @rule(token=st.integers(0, 2))
    def hit(self, token: int) -> None:
        found = self.pool.find(contents_of([token, token])[0], NO_PARENT)
        if found is not None:
            self.pool.acquire([found.block_id])
            self.tables.append([found.block_id])

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from([b for table in self.tables for b in table]))
        self.pool.pin(block_id)
        self.pins.append(block_id)

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self) -> None:
        self.pool.unpin(self.pins.pop())

    @invariant()
    def conserved(self) -> None:
        self.pool.check_invariants(self.tables)
        held = {block for table in self.tables for block in table} | set(self.pins)
        assert self.pool.num_held == len(held)

    def teardown(self) -> None:
        for block_id in self.pins:
            self.pool.unpin(block_id)
        for table in self.tables:
            self.pool.release(table)
        assert self.pool.num_available == 6


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
