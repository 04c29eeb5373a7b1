"""Pools of several ranks as arrays of bytes."""

import os
from pathlib import Path

import pytest
import torch

from pageray.cluster.ids import BlockId
from pageray.cluster.memory_plan import PageLayout
from pageray.cluster.page_layout import PoolLayout
from pageray.workers.page_pool import PagePool
from pageray.workers.transfer.mapped_pages import MappedPages, wire_bytes
from pageray.workers.transfer.page_write import PageSpan
from transfer_jobs import NUM_BLOCKS, SharedPools, layout_of


def test_same_bytes_as_the_page_pool_behind_it() -> None:
    plan = PageLayout(num_layers=3, num_kv_heads=2, block_size=4, head_dim=8, element_bytes=4)
    pool = PagePool.allocate(plan, 5, torch.float32, torch.device("cpu"))
    assert pool.share_path is not None
    layout = PoolLayout(num_layers=3, block_size=4, head_dim=8, element_bytes=4, shards=((0, 2),))
    pages = MappedPages.open(layout, [pool.share_path])
    assert pages.num_blocks == 5
    pool.tensor[2, 1, 0, 1] = torch.arange(32.0).view(4, 8)
    expected = pool.tensor[2, 1, 0, 1].numpy().tobytes()
    assert pages.rank(0)[2, 1, 0, 1].tobytes() == expected
    (part,) = pages.parts(PageSpan(BlockId(2), 1, 2))
    part[:] = 0
    assert not pool.tensor[2].any()
    pages.close()
    pool.close()


def test_parts_are_in_order_of_rank_and_outlive_close() -> None:
    pools = SharedPools(layout_of(2))
    parts = pools.pages.parts(PageSpan(BlockId(3), 1, 3))
    assert [part.nbytes for part in parts] == [2 * 2 * heads * 64 for heads in (2, 1)]
    assert wire_bytes(layout_of(2), PageSpan(BlockId(3), 1, 3)) == sum(p.nbytes for p in parts)
    pools.close()
    parts[0][:] = 1
    with pytest.raises(IndexError):
        pools.pages.rank(0)


def test_files_that_are_no_pools_are_refused(tmp_path: Path) -> None:
    layout = layout_of(2)
    pools = SharedPools(layout)
    with pytest.raises(ValueError, match="1 pools for 2 ranks"):
        MappedPages.open(layout, pools.paths[:1])
    with pytest.raises(ValueError, match="do not hold equally many pages"):
        MappedPages.open(layout, pools.paths[::-1])
    short = tmp_path / "short"
    short.write_bytes(bytes(layout.page_bytes(0)))
    with pytest.raises(ValueError, match="do not hold equally many pages"):
        MappedPages.open(layout_of(1), [str(short)])
    with pytest.raises(OSError, match="No such file"):
        MappedPages.open(layout_of(1), [f"/proc/{os.getpid()}/fd/99999"])
    with pytest.raises(ValueError, match=f"has 7 bytes; {NUM_BLOCKS} blocks need"):
        MappedPages(layout_of(1), NUM_BLOCKS, [bytearray(7)])
    pools.close()
