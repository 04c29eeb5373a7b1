"""Causal attention as `AttentionOptions` has it, one sequence after the other.

This is the definition, so it does what the fast kernels must not: it gathers the pages of a
sequence into one contiguous K and V and holds the whole score matrix.
"""

from typing import cast

import torch
from torch import Tensor

from pageray.kernels.ops import AttentionOptions, RaggedBatch
from pageray.kernels.reference.precision import widened


def paged_attention(
    q_THD: Tensor, kv_B2KPD: Tensor, batch: RaggedBatch, options: AttentionOptions
) -> Tensor:
    """A new [T, H, D] tensor of q's dtype; `Ops.paged_attention` has the contract."""
    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    starts = cast("list[int]", batch.query_starts_S1.tolist())
    kv_lens = cast("list[int]", batch.kv_lens_S.tolist())
    window = options.window
    for index, kv_len in enumerate(kv_lens):
        start, end = starts[index], starts[index + 1]
        if start == end:
            continue
        position = kv_len - (end - start)
        # Keys that no query of the chunk sees are not read: their block may be someone else's.
        first_key = max(0, position - window + 1) if window > 0 else 0
        k_KJD, v_KJD = _gather_keys(kv_B2KPD, batch.block_tables_SN[index], first_key, kv_len)
        queries = torch.arange(position, kv_len, device=q_THD.device)
        keys = torch.arange(first_key, kv_len, device=q_THD.device)
        is_visible_IJ = _visible(queries.unsqueeze(1), keys.unsqueeze(0), window)
        out_THD[start:end] = _attend(q_THD[start:end], k_KJD, v_KJD, is_visible_IJ, options)
    return out_THD


def _gather_keys(
    kv_B2KPD: Tensor, table_N: Tensor, first_key: int, kv_len: int
) -> tuple[Tensor, Tensor]:
    """K and V, each `widened` [K, J, D], of tokens first_key .. kv_len - 1."""
    tokens = torch.arange(first_key, kv_len, device=kv_B2KPD.device)
    block_size = kv_B2KPD.shape[3]
    blocks = table_N[tokens // block_size].long()
    kv_J2KD = widened(kv_B2KPD[blocks, :, :, tokens % block_size])
    k_JKD, v_JKD = kv_J2KD.unbind(dim=1)
    return k_JKD.transpose(0, 1), v_JKD.transpose(0, 1)


def _visible(query_positions_I1: Tensor, key_positions_1J: Tensor, window: int) -> Tensor:
    """bool [I, J]: causal, and inside the sliding window if there is one."""
    is_visible = key_positions_1J <= query_positions_I1
    if window > 0:
        is_visible &= key_positions_1J > query_positions_I1 - window
    return is_visible


def _attend(
    q_IHD: Tensor,
    k_KJD: Tensor,
    v_KJD: Tensor,
    is_visible_IJ: Tensor,
    options: AttentionOptions,
) -> Tensor:
    """Attention of one sequence, [I, H, D] in k's dtype; query head h reads KV head h // G."""
    num_queries, num_heads, head_dim = q_IHD.shape
    q_KGID = (
        q_IHD.to(k_KJD.dtype)
        .transpose(0, 1)
        .reshape(k_KJD.shape[0], num_heads // k_KJD.shape[0], num_queries, head_dim)
    )
    scores_KGIJ = torch.einsum("kgid,kjd->kgij", q_KGID, k_KJD) * (options.scale * options.k_scale)
    if options.softcap > 0:
        scores_KGIJ = options.softcap * torch.tanh(scores_KGIJ / options.softcap)
    scores_KGIJ = scores_KGIJ.masked_fill(~is_visible_IJ, -torch.inf)
    weights_KGIJ = _softmax(scores_KGIJ, options.sinks_H)
    out_KGID = torch.einsum("kgij,kjd->kgid", weights_KGIJ, v_KJD) * options.v_scale
    return out_KGID.reshape(num_heads, num_queries, head_dim).transpose(0, 1)


def _softmax(scores_KGIJ: Tensor, sinks_H: Tensor | None) -> Tensor:
    """Weights of the keys. A sink is one more key, whose weight nobody gets."""
    if sinks_H is None:
        return scores_KGIJ.softmax(dim=-1)
    num_kv_heads, group, num_queries, _ = scores_KGIJ.shape
    sinks_KGI1 = sinks_H.view(num_kv_heads, group, 1, 1).expand(-1, -1, num_queries, 1)
    return torch.cat((scores_KGIJ, sinks_KGI1), dim=-1).softmax(dim=-1)[..., :-1]
