import mmap
import os

import pytest
import torch

from pageray.cluster.errors import ConfigError
from pageray.cluster.memory_plan import PageLayout, blocks_that_fit
from pageray.workers.page_pool import PagePool

LAYOUT = PageLayout(num_layers=3, num_kv_heads=2, block_size=4, head_dim=8, element_bytes=4)
CPU = torch.device("cpu")


def test_block_is_one_contiguous_record_that_others_can_write() -> None:
    pool = PagePool.allocate(LAYOUT, 5, torch.float32, CPU)
    assert pool.tensor.shape == (6, 3, 2, 2, 4, 8)
    assert pool.tensor.is_contiguous()
    assert pool.tensor[1].numel() * 4 == LAYOUT.page_bytes
    assert pool.share_path is not None
    other = os.open(pool.share_path, os.O_RDWR)
    with mmap.mmap(other, 6 * LAYOUT.page_bytes) as mapping:
        record = torch.arange(LAYOUT.page_bytes // 4, dtype=torch.float32)
        start = 2 * LAYOUT.page_bytes
        mapping[start : start + LAYOUT.page_bytes] = record.numpy().tobytes()
    os.close(other)
    assert torch.equal(pool.tensor[2].flatten(), record)
    assert not pool.tensor[1].any()
    assert not pool.tensor[3].any()
    pool.close()


def test_pool_larger_than_the_host_names_both_numbers() -> None:
    num_blocks = (1 << 50) // LAYOUT.page_bytes
    with pytest.raises(ConfigError, match=r"needs 1,125,\d+.* bytes .*host has [\d,]+ bytes free"):
        PagePool.allocate(LAYOUT, num_blocks, torch.float32, CPU)


def test_too_little_for_one_block_says_how_much_is_needed() -> None:
    assert blocks_that_fit(2 * LAYOUT.page_bytes, LAYOUT) == 1
    with pytest.raises(ConfigError, match=f"at least {2 * LAYOUT.page_bytes:,} bytes"):
        blocks_that_fit(2 * LAYOUT.page_bytes - 1, LAYOUT)
