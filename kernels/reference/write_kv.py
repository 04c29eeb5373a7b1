"""K and V of the step's tokens go to their token slots."""

from torch import Tensor


def write_kv(k_TKD: Tensor, v_TKD: Tensor, kv_B2KPD: Tensor, slot_mapping_T: Tensor) -> None:
    """Write token t to slot s % P of block s // P, s = slot_mapping[t]; s = -1 skips the token."""
    block_size = kv_B2KPD.shape[3]
    is_kept_T = slot_mapping_T >= 0
    slots = slot_mapping_T[is_kept_T]
    for plane, values_TKD in enumerate((k_TKD, v_TKD)):
        pages_BKPD = kv_B2KPD[:, plane]
        pages_BKPD[slots // block_size, :, slots % block_size] = values_TKD[is_kept_T].to(
            kv_B2KPD.dtype
        )
