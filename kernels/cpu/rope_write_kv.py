"""The q/k norm, RoPE and the KV write of one layer, in one pass over the fused projection.

`head_buffer.py` has the formulas of one head, `rms_norm.py` the norm's.
"""

import torch
from torch import Tensor

from pageray.kernels.cpu.head_buffer import (
    load_head,
    load_normalised_head,
    rotate_head,
    store_head,
)
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
from pageray.kernels.cpu.numerics import ONE, float32
from pageray.kernels.cpu.pages import PageLayout, page_layout
from pageray.kernels.cpu.turn_head import copy_head, fills_vectors, turn_head
from pageray.kernels.ops import KvScales, QkNorm, RopeStep

Heads = tuple[int, int, int]
"""Number of query heads, token stride, head stride."""
Table = tuple[int, int]
"""Of cosines and sines: row stride, R / 2."""
Norm = tuple[bool, float]
"""Whether to normalise, eps."""
Gains = tuple[float, float]
"""What K and V are multiplied by."""
_FLOAT_BYTES = torch.float32.itemsize


def rope_write_kv(
    qkv_TAD: Tensor, kv_B2KPD: Tensor, step: RopeStep, norm: QkNorm | None, scales: KvScales
) -> Tensor:
    """q_THD, the rotated query heads of qkv; `Ops.rope_write_kv` has the contract.

    Raises ValueError, before anything is written, for a slot outside the pool, a position outside
    the table, a table of odd width or wider than a head, and a pool of 8-bit floats.
    """
    layout = page_layout(kv_B2KPD)
    num_tokens, num_all_heads, head_dim = qkv_TAD.shape
    num_heads = num_all_heads - 2 * kv_B2KPD.shape[2]
    _check(qkv_TAD, kv_B2KPD, step, norm)
    num_parts = num_threads(qkv_TAD.numel())
    buffers = torch.empty(num_parts, head_dim)
    args = (
        pointer(qkv_TAD),
        (num_heads, qkv_TAD.stride(0), qkv_TAD.stride(1)),
        pointer(kv_B2KPD),
        layout,
        pointer(step.positions_T),
        pointer(step.slot_mapping_T),
        pointer(step.cos_sin_LD),
        (step.cos_sin_LD.stride(0), step.cos_sin_LD.shape[1] // 2),
        *norm_arguments(norm, qkv_TAD),
        (1.0 / scales.k_scale, 1.0 / scales.v_scale),
        pointer(buffers),
    )
    if num_parts == 1:
        move_tokens(*args, 0, num_tokens)
    else:
        _move_tokens_threaded(*args, num_tokens, num_parts)
    return qkv_TAD[:, :num_heads]


def _check(qkv_TAD: Tensor, kv_B2KPD: Tensor, step: RopeStep, norm: QkNorm | None) -> None:
    num_kv_heads, head_dim = kv_B2KPD.shape[2], kv_B2KPD.shape[4]
    num_tokens, num_all_heads, _ = qkv_TAD.shape
    require_float("qkv", qkv_TAD)
    require_shape("qkv", qkv_TAD, num_tokens, num_all_heads, head_dim)
    if num_all_heads <= 2 * num_kv_heads:
        raise ValueError(
            f"qkv has {num_all_heads} heads; with {num_kv_heads} KV heads in the pool none is "
            "left for queries"
        )
    if norm is not None:
        require_shape("q_norm", norm.q_norm_D, head_dim)
        require_shape("k_norm", norm.k_norm_D, head_dim)
    check_rope_step(step, kv_B2KPD, num_tokens)


def check_rope_step(step: RopeStep, kv_B2KPD: Tensor, num_tokens: int) -> None:
    """Raises ValueError for a slot outside the pool, a position outside the table, a table of odd
    width or wider than a head."""
    num_blocks, _, _, block_size, head_dim = kv_B2KPD.shape
    require_dtype("slot_mapping", step.slot_mapping_T, torch.int64)
    require_shape("slot_mapping", step.slot_mapping_T, num_tokens)
    require_in_range("slot_mapping", step.slot_mapping_T, -1, num_blocks * block_size)
    require_dtype("cos_sin", step.cos_sin_LD, torch.float32)
    length, rotary_dim = step.cos_sin_LD.shape
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise ValueError(
            f"cos_sin has {rotary_dim} columns; it must be even and at most the head dim "
            f"({head_dim})"
        )
    require_dtype("positions", step.positions_T, torch.int64)
    require_shape("positions", step.positions_T, num_tokens)
    require_in_range("positions", step.positions_T, 0, length)


def norm_arguments(norm: QkNorm | None, unused: Tensor) -> tuple[Pointer, Pointer, Norm]:
    """Pointers to the weights of q and of k, and the rest."""
    if norm is None:
        # Never followed; a pointer of the weights' usual dtype, so that one kernel serves both.
        at = pointer(unused)
        return at, at, (False, 0.0)
    for name, weight_D in (("q_norm", norm.q_norm_D), ("k_norm", norm.k_norm_D)):
        require_float(name, weight_D)
    return pointer(norm.q_norm_D), pointer(norm.k_norm_D), (True, norm.eps)


@jit
def move_tokens(
    qkv_at: Pointer,
    heads: Heads,
    kv_at: Pointer,
    layout: PageLayout,
    positions_at: Pointer,
    slots_at: Pointer,
    table_at: Pointer,
    table: Table,
    q_norm_at: Pointer,
    k_norm_at: Pointer,
    norm: Norm,
    gains: Gains,
    buffer_at: Pointer,
    start: int,
    stop: int,
) -> None:
    num_heads, token_stride, head_stride = heads
    block_stride, plane_stride, kv_head_stride, num_kv_heads, block_size, head_dim = layout
    positions, slots = flat(positions_at, 0), flat(slots_at, 0)
    row_stride, half = table
    k_gain, v_gain = float32(gains[0]), float32(gains[1])
    in_vectors = fills_vectors(half, head_dim) and not norm[0]
    for token in range(start, stop):
        turn = (positions[token] * row_stride, half, head_dim)
        angles_at = table_at[0] + _FLOAT_BYTES * turn[0]
        head_at = token * token_stride
        for _ in range(num_heads):
            if in_vectors:
                turn_head(qkv_at, head_at, angles_at, half, qkv_at, head_at, ONE)
            else:
                _load_turned(qkv_at, head_at, buffer_at, table_at, turn, q_norm_at, norm)
                store_head(buffer_at, qkv_at, head_at, head_dim, ONE)
            head_at += head_stride
        slot = slots[token]
        if slot < 0:
            continue
        place = slot // block_size * block_stride + slot % block_size * head_dim
        for head in range(num_kv_heads):
            target = place + head * kv_head_stride
            if in_vectors:
                turn_head(qkv_at, head_at, angles_at, half, kv_at, target, k_gain)
            else:
                _load_turned(qkv_at, head_at, buffer_at, table_at, turn, k_norm_at, norm)
                store_head(buffer_at, kv_at, target, head_dim, k_gain)
            head_at += head_stride
        place += plane_stride
        for head in range(num_kv_heads):
            target = place + head * kv_head_stride
            if in_vectors:
                copy_head(qkv_at, head_at, head_dim, kv_at, target, v_gain)
            else:
                load_head(qkv_at, head_at, head_dim, buffer_at)
                store_head(buffer_at, kv_at, target, head_dim, v_gain)
            head_at += head_stride


@jit
def _load_turned(
    x_at: Pointer,
    start: int,
    buffer_at: Pointer,
    table_at: Pointer,
    turn: tuple[int, int, int],
    weight_at: Pointer,
    norm: Norm,
) -> None:
    """buffer = the head at element `start`, normalised if the model does that, and rotated.

    `turn`: the element at which the position's cosines start in the table, R / 2, D.
    """
    angles, half, head_dim = turn
    has_norm, eps = norm
    if has_norm:
        load_normalised_head(x_at, start, head_dim, weight_at, eps, buffer_at)
    else:
        load_head(x_at, start, head_dim, buffer_at)
    rotate_head(buffer_at, table_at, angles, half)


@jit_threaded
def _move_tokens_threaded(
    qkv_at: Pointer,
    heads: Heads,
    kv_at: Pointer,
    layout: PageLayout,
    positions_at: Pointer,
    slots_at: Pointer,
    table_at: Pointer,
    table: Table,
    q_norm_at: Pointer,
    k_norm_at: Pointer,
    norm: Norm,
    gains: Gains,
    buffers_at: Pointer,
    num_tokens: int,
    num_parts: int,
) -> None:
    for index in prange(num_parts):
        start, stop = part(num_tokens, num_parts, index)
        buffer_at = (buffers_at[0] + index * layout[5] * _FLOAT_BYTES, buffers_at[1])
        move_tokens(
            qkv_at,
            heads,
            kv_at,
            layout,
            positions_at,
            slots_at,
            table_at,
            table,
            q_norm_at,
            k_norm_at,
            norm,
            gains,
            buffer_at,
            start,
            stop,
        )
