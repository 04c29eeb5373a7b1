"""Rotary position embedding in half-split (NeoX) pairs (Su et al. 2021, arXiv:2104.09864).

With c, s the cosine and sine of position p and pair i, and R rotated dims:
    y[i] = x[i] c - x[i + R/2] s,    y[i + R/2] = x[i + R/2] c + x[i] s.
"""

import torch
from torch import Tensor

from pageray.kernels.reference.precision import widened


def apply_rope(x_THD: Tensor, positions_T: Tensor, cos_sin_LD: Tensor) -> None:
    """Rotate the first R = cos_sin_LD.shape[1] dims of x in place; the rest stays."""
    cos_T1R, sin_T1R = cos_sin_LD[positions_T].unsqueeze(1).chunk(2, dim=-1)
    rotated = x_THD[..., : cos_sin_LD.shape[1]]
    low, high = widened(rotated).chunk(2, dim=-1)
    rotated.copy_(
        torch.cat((low * cos_T1R - high * sin_T1R, high * cos_T1R + low * sin_T1R), dim=-1)
    )
