"""Pages between a pool and a contiguous staging buffer, copied as raw words.

The launchers take what `reference/gather_pages.py` describes. Shapes: pages_BL2KW and
staging_NL2KW, W the words of one head's [P, D] tile, which is one run of memory in both; blocks_N
int64. They are not in `Ops`: only pages of device memory have to be staged, and on the CPU the
transport reads the pool itself.
"""

# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# Reason: values inside a @triton.jit function have no Python types.

import torch
import triton
import triton.language as tl
from torch import Tensor

from pageray.kernels.gpu.checks import check_contiguous, check_ndim, check_shape, check_vector
from pageray.kernels.gpu.launch import Kernel, Launch, run
from pageray.kernels.gpu.words import as_words, widest_word

_MAX_BLOCK_W = 2048


# 64 bits wherever a block counts: a pool and a staging buffer have more than 2^31 words.
@triton.jit
def _tile_offsets(
    blocks_ptr,
    stride_B,
    stride_L,
    stride_2,
    stride_K,
    K: tl.constexpr,
    W: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """(offsets into the pool, offsets into the staging buffer, mask) of this program's words."""
    page = tl.program_id(0)
    tile = tl.program_id(1)
    layer, plane, head = tile // (2 * K), tile // K % 2, tile % K
    w_W = tl.program_id(2) * BLOCK_W + tl.arange(0, BLOCK_W)
    block = tl.load(blocks_ptr + page)
    in_block = layer.to(tl.int64) * stride_L + plane * stride_2 + head * stride_K
    staged = (page.to(tl.int64) * tl.num_programs(1) + tile) * W
    return block * stride_B + in_block + w_W, staged + w_W, w_W < W


# Grid: (N, L * 2 * K, cdiv(W, BLOCK_W)).
@triton.jit
def gather_pages_kernel(
    pages_ptr,
    staging_ptr,
    blocks_ptr,
    stride_B,
    stride_L,
    stride_2,
    stride_K,
    K: tl.constexpr,
    W: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    place_W, staged_W, mask_W = _tile_offsets(
        blocks_ptr, stride_B, stride_L, stride_2, stride_K, K, W, BLOCK_W
    )
    words_W = tl.load(pages_ptr + place_W, mask=mask_W)
    tl.store(staging_ptr + staged_W, words_W, mask=mask_W)


# Grid: (N, L * 2 * K, cdiv(W, BLOCK_W)).
@triton.jit
def scatter_pages_kernel(
    pages_ptr,
    staging_ptr,
    blocks_ptr,
    stride_B,
    stride_L,
    stride_2,
    stride_K,
    K: tl.constexpr,
    W: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    place_W, staged_W, mask_W = _tile_offsets(
        blocks_ptr, stride_B, stride_L, stride_2, stride_K, K, W, BLOCK_W
    )
    words_W = tl.load(staging_ptr + staged_W, mask=mask_W)
    tl.store(pages_ptr + place_W, words_W, mask=mask_W)


def gather_pages_launch(pages_BL2KPD: Tensor, staging_NL2KPD: Tensor, blocks_N: Tensor) -> Launch:
    """Copy pages out of the pool."""
    return _launch(gather_pages_kernel, pages_BL2KPD, staging_NL2KPD, blocks_N)


def scatter_pages_launch(staging_NL2KPD: Tensor, pages_BL2KPD: Tensor, blocks_N: Tensor) -> Launch:
    """Copy pages into the pool."""
    return _launch(scatter_pages_kernel, pages_BL2KPD, staging_NL2KPD, blocks_N)


def gather_pages(pages_BL2KPD: Tensor, staging_NL2KPD: Tensor, blocks_N: Tensor) -> None:
    """staging[n] = pages[blocks[n]]. Every block must be below B; the kernel cannot tell."""
    _check(pages_BL2KPD, staging_NL2KPD, blocks_N)
    run(gather_pages_launch(pages_BL2KPD, staging_NL2KPD, blocks_N))


def scatter_pages(staging_NL2KPD: Tensor, pages_BL2KPD: Tensor, blocks_N: Tensor) -> None:
    """pages[blocks[n]] = staging[n]. No block repeats, and every block must be below B."""
    _check(pages_BL2KPD, staging_NL2KPD, blocks_N)
    run(scatter_pages_launch(staging_NL2KPD, pages_BL2KPD, blocks_N))


def _check(pages_BL2KPD: Tensor, staging_NL2KPD: Tensor, blocks_N: Tensor) -> None:
    check_ndim("pages_BL2KPD", pages_BL2KPD, 6)
    check_shape("staging_NL2KPD", staging_NL2KPD, (blocks_N.shape[0], *pages_BL2KPD.shape[1:]))
    check_contiguous("staging_NL2KPD", staging_NL2KPD)
    check_vector("blocks_N", blocks_N, blocks_N.shape[0], torch.int64)
    if staging_NL2KPD.dtype != pages_BL2KPD.dtype:
        raise TypeError(
            f"staging_NL2KPD has dtype {staging_NL2KPD.dtype}, the pool {pages_BL2KPD.dtype}; "
            "pages are copied bit by bit, so they must be the same."
        )


def _launch(
    kernel: Kernel, pages_BL2KPD: Tensor, staging_NL2KPD: Tensor, blocks_N: Tensor
) -> Launch:
    word = widest_word([pages_BL2KPD, staging_NL2KPD], run_dims=2)
    pages_BL2KW = as_words(pages_BL2KPD, word, run_dims=2)
    num_layers, _, num_kv_heads, num_words = pages_BL2KW.shape[1:]
    block_words = min(_MAX_BLOCK_W, triton.next_power_of_2(num_words))
    stride_B, stride_L, stride_2, stride_K, _ = pages_BL2KW.stride()
    return Launch(
        kernel=kernel,
        grid=(
            blocks_N.shape[0],
            num_layers * 2 * num_kv_heads,
            triton.cdiv(num_words, block_words),
        ),
        args={
            "pages_ptr": pages_BL2KW,
            "staging_ptr": as_words(staging_NL2KPD, word, run_dims=2),
            "blocks_ptr": blocks_N,
            "stride_B": stride_B,
            "stride_L": stride_L,
            "stride_2": stride_2,
            "stride_K": stride_K,
        },
        constants={"K": num_kv_heads, "W": num_words, "BLOCK_W": block_words},
    )
