"""y = x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv:1910.07467)."""

import torch
from torch import Tensor

from pageray.kernels.reference.precision import widened


def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """A new tensor of x's shape and dtype; computed `widened` and rounded once, at the end."""
    x = widened(x_TE)
    mean_square = x.square().mean(dim=-1, keepdim=True)
    return (x * torch.rsqrt(mean_square + eps) * widened(weight_E)).to(x_TE.dtype)


def add_rms_norm(x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """residual += x in place, rounded to residual's dtype; returns rms_norm(residual)."""
    residual_TE.copy_(widened(residual_TE) + widened(x_TE))
    return rms_norm(residual_TE, weight_E, eps)
