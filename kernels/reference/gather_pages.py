"""Pages between a pool and a contiguous staging buffer, for sending and receiving them.

Layers and KV heads are chosen by slicing the pool, for example to cut pages anew for a rank that
holds other heads:

    gather_pages(pool[:, first_layer:end_layer, :, first_head:end_head], staging, blocks_N)

Shapes: pages_BL2KPD such a view, staging_NL2KPD contiguous, both of the same dtype; blocks_N int64.
"""

from torch import Tensor


def gather_pages(pages_BL2KPD: Tensor, staging_NL2KPD: Tensor, blocks_N: Tensor) -> None:
    """staging[n] = pages[blocks[n]]."""
    staging_NL2KPD.copy_(pages_BL2KPD[blocks_N])


def scatter_pages(staging_NL2KPD: Tensor, pages_BL2KPD: Tensor, blocks_N: Tensor) -> None:
    """pages[blocks[n]] = staging[n]. No block repeats."""
    pages_BL2KPD[blocks_N] = staging_NL2KPD
