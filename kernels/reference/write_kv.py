"""K and V of the step's tokens go to their token slots."""

import torch
from torch import Tensor

from pageray.kernels.ops import check_kv_scales


def write_kv(
    k_TKD: Tensor,
    v_TKD: Tensor,
    kv_B2KPD: Tensor,
    slot_mapping_T: Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """`WriteKv` has the contract."""
    check_kv_scales(k_scale, v_scale)
    block_size = kv_B2KPD.shape[3]
    is_kept_T = slot_mapping_T >= 0
    slots = slot_mapping_T[is_kept_T]
    for plane, (values_TKD, scale) in enumerate(((k_TKD, k_scale), (v_TKD, v_scale))):
        pages_BKPD = kv_B2KPD[:, plane]
        pages_BKPD[slots // block_size, :, slots % block_size] = _stored(
            values_TKD[is_kept_T].float() / scale, kv_B2KPD.dtype
        )


def _stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Float32 numbers as a pool of `dtype` holds them."""
    if dtype is torch.float8_e4m3fn:
        # Whether torch's own cast saturates depends on version and device.
        largest = torch.finfo(dtype).max
        x = x.clamp(-largest, largest)
    return x.to(dtype)
