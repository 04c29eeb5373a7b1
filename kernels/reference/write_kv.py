"""K and V of the step's tokens go to their token slots: pool = cast(value / scale)."""

import torch
from torch import Tensor

from pageray.kernels.ops import KvScales
from pageray.kernels.reference.precision import widened


def write_kv(
    k_TKD: Tensor, v_TKD: Tensor, kv_B2KPD: Tensor, slot_mapping_T: Tensor, scales: KvScales
) -> None:
    """Write token t to slot s % P of block s // P, s = slot_mapping[t]; s = -1 skips the token."""
    block_size = kv_B2KPD.shape[3]
    is_kept_T = slot_mapping_T >= 0
    slots = slot_mapping_T[is_kept_T]
    parts = ((k_TKD, scales.k_scale), (v_TKD, scales.v_scale))
    for plane, (values_TKD, scale) in enumerate(parts):
        pages_BKPD = kv_B2KPD[:, plane]
        scaled_TKD = widened(values_TKD[is_kept_T]) / scale
        pages_BKPD[slots // block_size, :, slots % block_size] = _cast(scaled_TKD, kv_B2KPD.dtype)


def _cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded to nearest even; float8_e4m3fn has no infinity and saturates instead."""
    if dtype is torch.float8_e4m3fn:
        limit = torch.finfo(dtype).max
        values = values.clamp(-limit, limit)
    return values.to(dtype)
