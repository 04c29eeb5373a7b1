"""K and V of the step's tokens go to their token slots."""

import torch
from torch import Tensor

from pageray.kernels.cpu.jit import jit, jit_threaded, num_threads, part, prange
from pageray.kernels.cpu.memory import (
    Pointer,
    flat,
    pointer,
    require_dtype,
    require_float,
    require_in_range,
    require_shape,
)
from pageray.kernels.cpu.numerics import narrow, widen
from pageray.kernels.cpu.pages import PageLayout, page_layout, require_unscaled

_Heads = tuple[int, int]
"""Token stride and head stride."""


def write_kv(
    k_TKD: Tensor,
    v_TKD: Tensor,
    kv_B2KPD: Tensor,
    slot_mapping_T: Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """`WriteKv` has the contract.

    Raises ValueError, before anything is written, if a slot lies outside the pool or a scale is
    not 1.
    """
    require_unscaled(k_scale, v_scale)
    layout = page_layout(kv_B2KPD)
    num_blocks, _, num_kv_heads, block_size, head_dim = kv_B2KPD.shape
    num_tokens = slot_mapping_T.shape[0]
    for name, x_TKD in (("k", k_TKD), ("v", v_TKD)):
        require_float(name, x_TKD)
        require_shape(name, x_TKD, num_tokens, num_kv_heads, head_dim)
    require_dtype("slot_mapping", slot_mapping_T, torch.int64)
    require_in_range("slot_mapping", slot_mapping_T, -1, num_blocks * block_size)
    args = (
        pointer(k_TKD),
        (k_TKD.stride(0), k_TKD.stride(1)),
        pointer(v_TKD),
        (v_TKD.stride(0), v_TKD.stride(1)),
        pointer(kv_B2KPD),
        layout,
        pointer(slot_mapping_T),
    )
    num_parts = num_threads(k_TKD.numel() + v_TKD.numel())
    if num_parts == 1:
        _write_tokens(*args, 0, num_tokens)
    else:
        _write_tokens_threaded(*args, num_tokens, num_parts)


@jit
def _write_tokens(
    k_at: Pointer,
    k_strides: _Heads,
    v_at: Pointer,
    v_strides: _Heads,
    kv_at: Pointer,
    layout: PageLayout,
    slots_at: Pointer,
    start: int,
    stop: int,
) -> None:
    slots = flat(slots_at, 0)
    block_stride, plane_stride, _, _, block_size, head_dim = layout
    for token in range(start, stop):
        slot = slots[token]
        if slot >= 0:
            place = slot // block_size * block_stride + slot % block_size * head_dim
            _write_heads(k_at, token, k_strides, kv_at, layout, place)
            _write_heads(v_at, token, v_strides, kv_at, layout, place + plane_stride)


@jit
def _write_heads(
    x_at: Pointer, token: int, strides: _Heads, kv_at: Pointer, layout: PageLayout, place: int
) -> None:
    """Write all heads of one token; head 0 goes to element `place` of the pool's layer."""
    _, _, head_stride, num_kv_heads, _, head_dim = layout
    for head in range(num_kv_heads):
        source = flat(x_at, token * strides[0] + head * strides[1])
        target = flat(kv_at, place + head * head_stride)
        for d in range(head_dim):
            target[d] = narrow(widen(source[d]), target)


@jit_threaded
def _write_tokens_threaded(
    k_at: Pointer,
    k_strides: _Heads,
    v_at: Pointer,
    v_strides: _Heads,
    kv_at: Pointer,
    layout: PageLayout,
    slots_at: Pointer,
    num_tokens: int,
    num_parts: int,
) -> None:
    for index in prange(num_parts):
        start, stop = part(num_tokens, num_parts, index)
        _write_tokens(k_at, k_strides, v_at, v_strides, kv_at, layout, slots_at, start, stop)
