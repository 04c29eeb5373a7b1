"""How far a kernel may be from the exact answer."""

from collections.abc import Sequence

import torch
from torch import Tensor

ERROR_BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
"""16 bits: two units in the last place, one for the result and one for a rounded value inside
(the residual, the probabilities). float32: sums over thousands of terms come in another order."""


def bound_of(outputs: Sequence[Tensor]) -> float:
    """For outputs of one operation: that of their widest error; whole numbers must be equal."""
    return max(ERROR_BOUNDS.get(output.dtype, 0.0) for output in outputs)


def largest_error(outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """max |y - e| / (|e| + rms(e)) over all elements: relative for large elements, and relative to
    the tensor's own size for those that cancel out. Whole numbers: the share that differs.

    infinite where one is NaN and the other is not. `expected` may be wider than `outputs`.
    """
    return max(_error(y, e) for y, e in zip(outputs, expected, strict=True))


def _error(output: Tensor, expected: Tensor) -> float:
    if output.shape != expected.shape:
        raise ValueError(f"The shapes are {tuple(output.shape)} and {tuple(expected.shape)}.")
    if output.numel() == 0:
        return 0.0
    if not output.is_floating_point():
        return float((output != expected).double().mean())
    y, e = output.double(), expected.double()
    size = e.square().mean().sqrt() + torch.finfo(torch.float64).tiny
    error = (y - e).abs() / (e.abs() + size)
    return float(error.nan_to_num(nan=torch.inf).max())
