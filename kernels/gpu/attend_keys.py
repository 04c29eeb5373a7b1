"""The inner loop of attention: packed query rows against a run of one sequence's keys.

Online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867) in base 2. Per row, over the keys
seen so far: m the largest score, l = sum 2^(s - m), acc = sum 2^(s - m) v. A tile with scores s
takes (m, l, acc) to
    m' = max(m, max s),   l' = 2^(m - m') l + sum 2^(s - m'),   acc' likewise.
The result is acc / l (`attention_epilogue.py`); scores are in base 2 (`score_scales.py`).

Shapes: M packed rows, J keys of a tile, D head dim.
"""

# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# Reason: values inside a @triton.jit function have no Python types.

import triton
import triton.language as tl


@triton.jit
def first_visible_key(position, WINDOW: tl.constexpr):
    """The first key that a query at `position` sees; WINDOW 0 is no window."""
    if WINDOW > 0:
        return tl.maximum(position - WINDOW + 1, 0)
    return position * 0  # Not a bare 0: callers need a value of position's type.


@triton.jit
def load_query(
    q_ptr, token_M, head_M, mask_M, stride_T, stride_H, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """[M, D] packed query rows, zero where masked."""
    d_D = tl.arange(0, BLOCK_D)
    offset_M = token_M.to(tl.int64) * stride_T + head_M * stride_H
    mask_MD = mask_M[:, None] & (d_D < D)[None, :]
    return tl.load(q_ptr + offset_M[:, None] + d_D[None, :], mask=mask_MD, other=0.0)


@triton.jit
def attend_keys(
    q_MD,
    position_M,
    k_ptr,
    v_ptr,
    table_ptr,
    stride_kv_B,
    first_key,
    end_key,
    score_scale,
    softcap_log2,
    IS_CAPPED: tl.constexpr,
    WINDOW: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
):
    """(m_M, l_M, acc_MD) over keys first_key .. end_key - 1 of the sequence with this table.

    `k_ptr` and `v_ptr` point at this layer's and head's tiles in block 0. Tiles of keys start at
    multiples of TILE whatever first_key is, so a row's result does not depend on its neighbours.
    No slot and no table entry outside the range is read.
    """
    d_D = tl.arange(0, BLOCK_D)
    m_M = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_M = tl.zeros((BLOCK_M,), tl.float32)
    acc_MD = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(first_key // TILE * TILE, end_key, TILE):
        key_J = start + tl.arange(0, TILE)
        is_read_J = (key_J >= first_key) & (key_J < end_key)
        mask_JD = is_read_J[:, None] & (d_D < D)[None, :]
        block_J = tl.load(table_ptr + key_J // P, mask=is_read_J, other=0)
        # 64 bits: a pool has more than 2^31 elements.
        slot_J = block_J.to(tl.int64) * stride_kv_B + (key_J % P) * D
        slot_JD = slot_J[:, None] + d_D[None, :]
        # A slot outside the range may hold NaN, and 0 * NaN is NaN: both loads fill with zeros.
        k_JD = tl.load(k_ptr + slot_JD, mask=mask_JD, other=0.0).to(q_MD.dtype)
        v_JD = tl.load(v_ptr + slot_JD, mask=mask_JD, other=0.0).to(q_MD.dtype)
        s_MJ = tl.dot(q_MD, tl.trans(k_JD), input_precision="ieee") * score_scale
        if IS_CAPPED:
            s_MJ = softcap_log2 - 2 * softcap_log2 / (1 + tl.exp2(s_MJ))
        is_visible_MJ = is_read_J[None, :] & (key_J[None, :] <= position_M[:, None])
        if WINDOW > 0:
            is_visible_MJ &= key_J[None, :] > position_M[:, None] - WINDOW
        s_MJ = tl.where(is_visible_MJ, s_MJ, float("-inf"))
        new_m_M = tl.maximum(m_M, tl.max(s_MJ, axis=1))
        # A row that has seen no key yet has m = -inf, and -inf - -inf is NaN: subtract 0 instead.
        shift_M = tl.where(new_m_M == float("-inf"), 0.0, new_m_M)
        p_MJ = tl.exp2(s_MJ - shift_M[:, None])
        alpha_M = tl.exp2(m_M - shift_M)
        l_M = l_M * alpha_M + tl.sum(p_MJ, axis=1)
        acc_MD = acc_MD * alpha_M[:, None]
        acc_MD = tl.dot(p_MJ.to(q_MD.dtype), v_JD, acc_MD, input_precision="ieee")
        m_M = new_m_M
    return m_M, l_M, acc_MD
