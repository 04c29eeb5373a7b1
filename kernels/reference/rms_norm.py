"""y = x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv:1910.07467)."""

import torch
from torch import Tensor


def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """A new tensor of x's shape and dtype; computed in float32 and rounded once, at the end."""
    x = x_TE.float()
    mean_square = x.square().mean(dim=-1, keepdim=True)
    return (x * torch.rsqrt(mean_square + eps) * weight_E.float()).to(x_TE.dtype)


def add_rms_norm(x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """residual += x in place, rounded to residual's dtype; returns rms_norm(residual)."""
    residual_TE.copy_(residual_TE.float() + x_TE.float())
    return rms_norm(residual_TE, weight_E, eps)
