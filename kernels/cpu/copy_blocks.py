"""Whole pages are copied inside one pool (copy-on-write)."""

import numpy as np
import torch
from torch import Tensor

from pageray.kernels.cpu.jit import jit, jit_threaded, num_threads, part, prange
from pageray.kernels.cpu.memory import (
    Pointer,
    flat,
    pointer,
    require_dtype,
    require_in_range,
    require_shape,
)

_BYTE = np.uint8(0)


def copy_blocks(pool: Tensor, pairs_C2: Tensor) -> None:
    """pool[destination] = pool[source] for each (source, destination) pair, in place.

    Raises ValueError if a block id is outside the pool or a block is not one run of bytes.
    """
    num_pairs, num_blocks = pairs_C2.shape[0], pool.shape[0]
    require_shape("pairs", pairs_C2, num_pairs, 2)
    require_dtype("pairs", pairs_C2, torch.int64)
    if not pool.is_contiguous():
        raise ValueError(
            f"pool has strides {pool.stride()}; whole pools only, which are contiguous"
        )
    pairs_C2 = pairs_C2.contiguous()
    require_in_range("pairs, flattened,", pairs_C2.view(-1), 0, num_blocks)
    record_bytes = pool.nbytes // max(num_blocks, 1)
    args = ((pool.data_ptr(), _BYTE), record_bytes, pointer(pairs_C2))
    num_parts = num_threads(num_pairs * record_bytes)
    if num_parts == 1:
        _copy_pairs(*args, num_pairs, 0, record_bytes)
    else:
        _copy_pairs_threaded(*args, num_pairs, num_parts)


@jit
def _copy_pairs(
    pool_at: Pointer, record_bytes: int, pairs_at: Pointer, num_pairs: int, start: int, stop: int
) -> None:
    """Copy bytes start .. stop of each record."""
    pairs = flat(pairs_at, 0)
    for pair in range(num_pairs):
        source = flat(pool_at, pairs[2 * pair] * record_bytes + start)
        target = flat(pool_at, pairs[2 * pair + 1] * record_bytes + start)
        for byte in range(stop - start):
            target[byte] = source[byte]


@jit_threaded
def _copy_pairs_threaded(
    pool_at: Pointer, record_bytes: int, pairs_at: Pointer, num_pairs: int, num_parts: int
) -> None:
    for index in prange(num_parts):
        start, stop = part(record_bytes, num_parts, index)
        _copy_pairs(pool_at, record_bytes, pairs_at, num_pairs, start, stop)
