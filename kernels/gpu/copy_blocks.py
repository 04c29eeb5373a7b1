"""Whole pages are copied inside one pool (copy-on-write).

Shapes: pool [B, ...] with contiguous records, copied as raw words; pairs_C2 int64
(source, destination).
"""

# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# Reason: values inside a @triton.jit function have no Python types.

import torch
import triton
import triton.language as tl
from torch import Tensor

from pageray.kernels.gpu.checks import check_contiguous, check_dtype, check_shape
from pageray.kernels.gpu.launch import Launch, run
from pageray.kernels.gpu.words import as_words, widest_word

_BLOCK_W = 2048


# Grid: (C, cdiv(record words, BLOCK_W)).
@triton.jit
def copy_blocks_kernel(pool_ptr, pairs_ptr, stride_B, num_words, BLOCK_W: tl.constexpr):
    pair_ptr = pairs_ptr + 2 * tl.program_id(0)
    source = tl.load(pair_ptr)
    destination = tl.load(pair_ptr + 1)
    w_W = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    mask_W = w_W < num_words
    words_W = tl.load(pool_ptr + source * stride_B + w_W, mask=mask_W)
    tl.store(pool_ptr + destination * stride_B + w_W, words_W, mask=mask_W)


def copy_blocks_launch(pool: Tensor, pairs_C2: Tensor) -> Launch:
    """Copy records."""
    record_dims = pool.ndim - 1
    records_BW = as_words(pool, widest_word([pool], record_dims), record_dims)
    num_words = records_BW.shape[1]
    return Launch(
        kernel=copy_blocks_kernel,
        grid=(pairs_C2.shape[0], triton.cdiv(num_words, _BLOCK_W)),
        args={
            "pool_ptr": records_BW,
            "pairs_ptr": pairs_C2,
            "stride_B": records_BW.stride(0),
            "num_words": num_words,
        },
        constants={"BLOCK_W": _BLOCK_W},
    )


def copy_blocks(pool: Tensor, pairs_C2: Tensor) -> None:
    """pool[destination] = pool[source] for each pair, in place; `Ops.copy_blocks`."""
    check_dtype("pairs_C2", pairs_C2, (torch.int64,))
    check_shape("pairs_C2", pairs_C2, (pairs_C2.shape[0], 2))
    check_contiguous("pairs_C2", pairs_C2)
    if pool.numel() == 0:
        return
    run(copy_blocks_launch(pool, pairs_C2))
