"""How one layer of the pool lies in memory."""

import torch
from torch import Tensor

from pageray.kernels.cpu.memory import require_float

PageLayout = tuple[int, int, int, int, int, int]
"""Block stride, plane stride (K to V), KV head stride, all in elements; number of KV heads, block
size P, head dim D. Inside a [P, D] tile a token's D elements follow the previous token's."""


def page_layout(kv_B2KPD: Tensor) -> PageLayout:
    """Raises ValueError unless the view is [B, 2, K, P, D] with contiguous [P, D] tiles."""
    if kv_B2KPD.dim() != 5 or kv_B2KPD.shape[1] != 2:
        raise ValueError(f"kv has shape {tuple(kv_B2KPD.shape)}; it must be (B, 2, K, P, D)")
    if kv_B2KPD.dtype is torch.float8_e4m3fn:
        raise ValueError(
            "kv is torch.float8_e4m3fn, which only a GPU can store; on the CPU the pool must be "
            "float32, bfloat16 or float16"
        )
    require_float("kv", kv_B2KPD)
    _, _, num_kv_heads, block_size, head_dim = kv_B2KPD.shape
    block_stride, plane_stride, head_stride, slot_stride, _ = kv_B2KPD.stride()
    if slot_stride != head_dim and block_size > 1:
        raise ValueError(
            f"kv has stride {slot_stride} between token slots; it must be the head dim "
            f"({head_dim}), so that a head's page is one run of bytes"
        )
    return block_stride, plane_stride, head_stride, num_kv_heads, block_size, head_dim


def require_unscaled(k_scale: float, v_scale: float) -> None:
    """Raise ValueError unless both are 1."""
    if k_scale != 1.0 or v_scale != 1.0:
        raise ValueError(
            f"k_scale is {k_scale} and v_scale {v_scale}; on the CPU both must be 1: its pools are "
            "float32, bfloat16 or float16, and keep K and V as they are"
        )
