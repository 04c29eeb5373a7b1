"""Memory as raw words: a copy moves bits, so the widest integer that divides it is best."""

from collections.abc import Sequence

import torch
from torch import Tensor

_WORD_DTYPES = (torch.int64, torch.int32, torch.int16, torch.uint8)
"""Widest first."""


def widest_word(tensors: Sequence[Tensor], run_dims: int) -> torch.dtype:
    """The word in which `as_words` can view every tensor."""
    extents = [extent for tensor in tensors for extent in _extents(tensor, run_dims)]
    return next(word for word in _WORD_DTYPES if not any(n % word.itemsize for n in extents))


def as_words(tensor: Tensor, word: torch.dtype, run_dims: int) -> Tensor:
    """The same memory, its last `run_dims` dimensions as one dimension of words.

    Raises ValueError when these dimensions are not one run of memory.
    """
    leading = tensor.ndim - run_dims
    run_shape = tensor.shape[leading:]
    one_run = torch.empty_strided(run_shape, tensor.stride()[leading:], device="meta")
    if not one_run.is_contiguous():
        raise ValueError(
            f"A tensor of shape {tuple(tensor.shape)} has strides {tensor.stride()}; its last "
            f"{run_dims} dimensions must be contiguous."
        )
    runs = tensor.as_strided(
        (*tensor.shape[:leading], run_shape.numel()), (*tensor.stride()[:leading], 1)
    )
    return runs.view(word)


def _extents(tensor: Tensor, run_dims: int) -> tuple[int, ...]:
    """In bytes: where the tensor starts, how far apart its runs are, and how long."""
    leading = tensor.ndim - run_dims
    element = tensor.element_size()
    steps = (tensor.storage_offset(), *tensor.stride()[:leading], tensor.shape[leading:].numel())
    return tuple(int(step) * element for step in steps)
