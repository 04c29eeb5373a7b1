"""Tile sizes and launch settings of the attention kernels, by head dim and element size.

A row of a query tile is one query head of one token: the G = H / K heads that share a KV head
are packed, row m being token m // G and head m % G, so that one load of a page serves them all.
"""

from dataclasses import dataclass

import triton

MAX_HEAD_DIM = 256
MAX_BLOCK_SIZE = 128

MIN_DOT_SIZE = 16
"""No side of a `tl.dot` may be shorter."""


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """BLOCK_M packed query rows against TILE keys at a time."""

    block_m: int
    tile: int
    num_warps: int
    num_stages: int
    hip_num_stages: int = 1
    """On AMD GPUs. The LDS has room for more, the vector registers mostly do not."""


def padded_head_dim(head_dim: int) -> int:
    """The power of two a head is padded to."""
    return max(MIN_DOT_SIZE, triton.next_power_of_2(head_dim))


def decode_tiles(group_size: int, head_dim: int, element_bytes: int) -> Tiles:
    """Few rows, so memory bandwidth decides: small tiles and deep prefetch.

    `element_bytes` is that of the dtype in which products run. In float32 they run without
    tensor cores, in registers: only short tiles over many warps leave room for them.
    """
    block_m = max(MIN_DOT_SIZE, triton.next_power_of_2(group_size))
    if element_bytes > 2:
        return Tiles(block_m=block_m, tile=16, num_warps=8, num_stages=2)
    tile = 64 if padded_head_dim(head_dim) <= 128 else 32
    return Tiles(block_m=block_m, tile=tile, num_warps=4, num_stages=3, hip_num_stages=2)


def prefill_tiles(group_size: int, head_dim: int, element_bytes: int) -> Tiles:
    """Many rows, so arithmetic decides: from 64 rows on, wgmma (sm_90) and tcgen05 (sm_100)."""
    least = triton.next_power_of_2(group_size)
    if element_bytes > 2:
        return Tiles(block_m=max(32, least), tile=16, num_warps=8, num_stages=2)
    if padded_head_dim(head_dim) <= 128:
        return Tiles(block_m=max(128, least), tile=64, num_warps=8, num_stages=2)
    return Tiles(block_m=max(64, least), tile=32, num_warps=8, num_stages=2)
