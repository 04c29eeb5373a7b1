"""Which dtype the definitions compute in."""

import torch
from torch import Tensor


def widened(x: Tensor) -> Tensor:
    """x in float32; in float64 if that is what it came in, so that a check of the fast kernels
    can ask for an answer that is exact beside theirs."""
    return x if x.dtype is torch.float64 else x.float()
