"""Repetition, presence and frequency penalties.

Repetition (Keskar et al. 2019, arXiv:1909.05858): positive logits are divided, negative ones
multiplied. Presence and frequency (OpenAI API): logit -= presence + count * frequency.

Shapes: logits_RV float32; histories are concatenated in history_N. Two kernels: one counts the
tokens of each history into a scratch counts_RV, one walks the vocabulary and applies.
"""

# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# Reason: values inside a @triton.jit function have no Python types.

import torch
import triton
import triton.language as tl
from torch import Tensor

from pageray.kernels.gpu.checks import (
    check_dtype,
    check_last_dim_contiguous,
    check_ndim,
    check_vector,
)
from pageray.kernels.gpu.launch import Launch, run
from pageray.kernels.ops import PenaltyRows

_BLOCK_N = 512
_BLOCK_V = 1024
_PROGRAMS_PER_HISTORY = 8

_PROMPT_BIT: tl.constexpr = tl.constexpr(1 << 30)
"""Set in a count for a token of the prompt; counts of output tokens stay far below it."""


# Grid: (R, _PROGRAMS_PER_HISTORY): the programs of a row take its history in turns, because the
# longest history is known on the device only.
@triton.jit
def count_tokens_kernel(
    history_ptr,
    starts_ptr,
    prompt_lens_ptr,
    counts_ptr,
    V,
    STRIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0)
    start = tl.load(starts_ptr + row)
    end = tl.load(starts_ptr + row + 1)
    output_start = start + tl.load(prompt_lens_ptr + row)
    counts_row_ptr = counts_ptr + row.to(tl.int64) * V
    for tile in range(start + tl.program_id(1) * BLOCK_N, end, STRIDE):
        n_N = tile + tl.arange(0, BLOCK_N)
        token_N = tl.load(history_ptr + n_N, mask=n_N < end, other=0)
        is_output_N = (n_N >= output_start) & (n_N < end)
        tl.atomic_add(counts_row_ptr + token_N, 1, mask=is_output_N)
        is_prompt_N = n_N < output_start
        tl.atomic_or(counts_row_ptr + token_N, _PROMPT_BIT, mask=is_prompt_N)


# Grid: (R, cdiv(V, BLOCK_V)).
@triton.jit
def apply_penalties_kernel(
    logits_ptr,
    rows_ptr,
    counts_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    stride_logits_R,
    V,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0)
    v_V = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_V = v_V < V
    seen_V = tl.load(counts_ptr + row.to(tl.int64) * V + v_V, mask=mask_V, other=0)
    logits_ptrs = logits_ptr + tl.load(rows_ptr + row) * stride_logits_R + v_V
    logit_V = tl.load(logits_ptrs, mask=mask_V, other=0.0)
    repetition = tl.load(repetition_ptr + row)
    repeated_V = tl.where(logit_V > 0, tl.div_rn(logit_V, repetition), logit_V * repetition)
    logit_V = tl.where(seen_V > 0, repeated_V, logit_V)
    count_V = seen_V & (_PROMPT_BIT - 1)
    penalty_V = tl.load(presence_ptr + row) + count_V.to(tl.float32) * tl.load(frequency_ptr + row)
    logit_V = tl.where(count_V > 0, logit_V - penalty_V, logit_V)
    # Tokens of no history are left alone: their logits need no write.
    tl.store(logits_ptrs, logit_V, mask=mask_V & (seen_V > 0))


def count_tokens_launch(penalties: PenaltyRows, counts_RV: Tensor) -> Launch:
    """counts_RV (int32, zeroed) += occurrences in the output; the prompt's tokens get a flag."""
    num_rows, vocab_size = counts_RV.shape
    return Launch(
        kernel=count_tokens_kernel,
        grid=(num_rows, _PROGRAMS_PER_HISTORY),
        args={
            "history_ptr": penalties.history_N,
            "starts_ptr": penalties.starts_R1,
            "prompt_lens_ptr": penalties.prompt_lens_R,
            "counts_ptr": counts_RV,
            "V": vocab_size,
        },
        constants={"STRIDE": _PROGRAMS_PER_HISTORY * _BLOCK_N, "BLOCK_N": _BLOCK_N},
    )


def apply_penalties_launch(logits_RV: Tensor, penalties: PenaltyRows, counts_RV: Tensor) -> Launch:
    """Change logits in place from the counts."""
    num_rows, vocab_size = counts_RV.shape
    return Launch(
        kernel=apply_penalties_kernel,
        grid=(num_rows, triton.cdiv(vocab_size, _BLOCK_V)),
        args={
            "logits_ptr": logits_RV,
            "rows_ptr": penalties.rows_R,
            "counts_ptr": counts_RV,
            "repetition_ptr": penalties.repetition_R,
            "presence_ptr": penalties.presence_R,
            "frequency_ptr": penalties.frequency_R,
            "stride_logits_R": logits_RV.stride(0),
            "V": vocab_size,
        },
        constants={"BLOCK_V": _BLOCK_V},
    )


def apply_penalties(logits_RV: Tensor, penalties: PenaltyRows) -> None:
    """Change the named rows in place; `Ops.apply_penalties` has the contract.

    Takes 4 bytes of scratch per penalised row and vocabulary entry.
    """
    check_dtype("logits_RV", logits_RV, (torch.float32,))
    check_ndim("logits_RV", logits_RV, 2)
    check_last_dim_contiguous("logits_RV", logits_RV)
    num_rows = penalties.rows_R.shape[0]
    check_vector("rows_R", penalties.rows_R, num_rows, torch.int64)
    check_vector("history_N", penalties.history_N, penalties.history_N.shape[0], torch.int64)
    check_vector("starts_R1", penalties.starts_R1, num_rows + 1, torch.int64)
    check_vector("prompt_lens_R", penalties.prompt_lens_R, num_rows, torch.int64)
    check_vector("repetition_R", penalties.repetition_R, num_rows, torch.float32)
    check_vector("presence_R", penalties.presence_R, num_rows, torch.float32)
    check_vector("frequency_R", penalties.frequency_R, num_rows, torch.float32)
    counts_RV = torch.zeros(
        (num_rows, logits_RV.shape[1]), dtype=torch.int32, device=logits_RV.device
    )
    run(count_tokens_launch(penalties, counts_RV))
    run(apply_penalties_launch(logits_RV, penalties, counts_RV))
