"""Whole pages are copied inside one pool (copy-on-write)."""

from torch import Tensor


def copy_blocks(pool: Tensor, pairs_C2: Tensor) -> None:
    """pool[destination] = pool[source] for each (source, destination) pair, in place."""
    pool[pairs_C2[:, 1]] = pool[pairs_C2[:, 0]]
