"""Blocks that another engine writes into: who owns them at each moment."""

import random

import pytest

from pageray.cluster.block_events import BlockEventLog
from pageray.cluster.block_keys import BlockContent, BlockHasher, root_key
from pageray.cluster.block_pool import BlockPool
from pageray.cluster.coordinator.messages import BlocksRemoved, BlocksStored, CacheCleared
from pageray.cluster.ids import BlockKey, TransferId
from pageray.cluster.page_exports import PageExports
from pageray.cluster.page_imports import PageImports
from pageray.cluster.prefix_index import NO_PARENT
from pageray.cluster.prefix_run import find_run

SIZE = 2


def chain_of(tokens: list[int]) -> list[BlockContent]:
    chain: list[BlockContent] = []
    BlockHasher(root_key("m", "f", SIZE), SIZE).extend(chain, tokens, "")
    return chain


def publish_all(pool: BlockPool, chain: list[BlockContent]) -> None:
    blocks = pool.allocate(len(chain))
    assert blocks is not None
    parent = NO_PARENT
    for block_id, content in zip(blocks, chain, strict=True):
        published = pool.publish(block_id, content, parent)
        assert published is not None
        parent = published
    pool.release(blocks)


def test_imported_blocks_are_hit_only_once_they_are_finished() -> None:
    pool = BlockPool(8)
    imports = PageImports(pool)
    chain = chain_of([1, 2, 3, 4, 5, 6])
    publish_all(pool, chain[:1])
    begun = imports.begin(TransferId(1), chain, num_spare=8)
    assert begun is not None
    assert (begun.num_local, len(begun.block_ids)) == (1, 2)
    assert len(find_run(pool, chain)) == 1
    pool.check_invariants(imports.tables())
    assert imports.finish(TransferId(1), num_arrived=2) == 2
    assert [hit.block_id for hit in find_run(pool, chain)] == begun.table
    pool.check_invariants([])
    assert pool.num_held == 0


def test_only_what_has_arrived_is_published() -> None:
    pool = BlockPool(8)
    imports = PageImports(pool)
    chain = chain_of([1, 2, 3, 4, 5, 6])
    assert imports.begin(TransferId(1), chain, num_spare=8) is not None
    assert imports.finish(TransferId(1), num_arrived=1) == 1
    assert len(find_run(pool, chain)) == 1
    assert (pool.num_cached, pool.num_held) == (1, 0)


def test_aborted_blocks_are_nobodys_until_the_writer_is_known_to_have_stopped() -> None:
    pool = BlockPool(2)
    imports = PageImports(pool)
    chain = chain_of([1, 2, 3, 4])
    assert imports.begin(TransferId(1), chain, num_spare=2) is not None
    imports.abort(TransferId(1))
    assert pool.allocate(1) is None
    assert imports.num_quarantined == 1
    with pytest.raises(ValueError, match="quarantined"):
        imports.finish(TransferId(1), num_arrived=2)
    imports.settle(TransferId(1))
    assert find_run(pool, chain) == []
    assert pool.num_available == 2


def test_visitors_take_only_what_is_spare() -> None:
    pool = BlockPool(8)
    imports = PageImports(pool)
    assert imports.begin(TransferId(1), chain_of([1, 2, 3, 4]), num_spare=1) is None
    assert pool.num_held == 0


def test_nothing_is_imported_that_is_here_already() -> None:
    pool = BlockPool(8)
    imports = PageImports(pool)
    publish_all(pool, chain_of([1, 2]))
    assert imports.begin(TransferId(1), chain_of([1, 2]), num_spare=8) is None
    assert pool.num_held == 0


def test_after_a_cache_clear_an_open_import_publishes_nothing() -> None:
    pool = BlockPool(8)
    imports = PageImports(pool)
    chain = chain_of([1, 2, 3, 4])
    publish_all(pool, chain[:1])
    assert imports.begin(TransferId(1), chain, num_spare=8) is not None
    pool.clear_cache()
    imports.cache_was_cleared()
    assert imports.finish(TransferId(1), num_arrived=1) == 0
    assert pool.num_available == 8


def test_exported_blocks_are_pinned_until_closed() -> None:
    pool = BlockPool(2)
    exports = PageExports(pool)
    chain = chain_of([1, 2, 3, 4])
    publish_all(pool, chain)
    export = exports.open(chain, first=1)
    assert export is not None
    assert len(export.block_ids) == 1
    assert pool.allocate(2) is None
    exports.close(export.export_id)
    assert pool.num_available == 2
    assert exports.open(chain_of([9, 9]), first=0) is None
    with pytest.raises(KeyError):
        exports.close(export.export_id)


def test_events_tell_what_is_published() -> None:
    """A table kept from the events alone equals the pool's own, after 2,000 random operations."""
    rng = random.Random(5)
    log = BlockEventLog()
    pool = BlockPool(12, log)
    told: set[BlockKey] = set()
    for _ in range(2_000):
        action = rng.random()
        if action < 0.01:
            pool.clear_cache()
        elif pool.num_available >= 3:
            chain = chain_of([rng.randrange(3) for _ in range(6)])
            hits = find_run(pool, chain)
            pool.acquire(hit.block_id for hit in hits)
            fresh = pool.allocate(3 - len(hits))
            assert fresh is not None
            table = [*(hit.block_id for hit in hits), *fresh]
            parent = hits[-1].publication_id if hits else NO_PARENT
            for block_id, content in zip(fresh, chain[len(hits) :], strict=True):
                parent = pool.publish(block_id, content, parent)
                assert parent is not None
            pool.release(table)
        events = log.take()
        assert events is not None
        for event in events:
            match event:
                case BlocksStored(keys):
                    assert not told & set(keys)
                    told |= set(keys)
                case BlocksRemoved(keys):
                    assert told >= set(keys)
                    told -= set(keys)
                case CacheCleared():
                    told.clear()
        assert told == set(pool.published_keys())
    assert pool.num_evictions > 100


def test_events_that_nobody_takes_are_not_kept_for_ever() -> None:
    log = BlockEventLog(max_pending_keys=3)
    for number in range(4):
        log.stored(BlockKey(bytes([number])))
    assert log.take() is None
    log.removed(BlockKey(b"a"))
    assert log.take() == (BlocksRemoved((BlockKey(b"a"),)),)
    assert log.take() == ()
