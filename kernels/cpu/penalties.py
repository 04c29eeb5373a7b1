"""Repetition, presence and frequency penalties.

Repetition (Keskar et al. 2019, arXiv:1909.05858): positive logits are divided, negative ones
multiplied. Presence and frequency (OpenAI API): logit -= presence + count * frequency.
"""

import numpy as np
import torch
from torch import Tensor

from pageray.kernels.cpu.jit import jit
from pageray.kernels.cpu.memory import (
    Array,
    Pointer,
    flat,
    pointer,
    require_dtype,
    require_in_range,
    require_shape,
)
from pageray.kernels.cpu.numerics import ZERO, float32
from pageray.kernels.ops import PenaltyRows

_NOT_SEEN = -1


def apply_penalties(logits_RV: Tensor, penalties: PenaltyRows) -> None:
    """Change the named rows of float32 logits in place.

    Raises ValueError, before anything is changed, on a token id or row outside the logits.
    """
    require_dtype("logits", logits_RV, torch.float32)
    num_logits_rows, vocab_size = logits_RV.shape
    num_rows = penalties.rows_R.shape[0]
    _check(penalties, num_rows)
    require_in_range("rows", penalties.rows_R, 0, num_logits_rows)
    require_in_range("history", penalties.history_N, 0, vocab_size)
    require_in_range("starts", penalties.starts_R1, 0, penalties.history_N.shape[0] + 1)
    _penalise_rows(
        pointer(logits_RV),
        (logits_RV.stride(0), vocab_size),
        pointer(penalties.rows_R),
        pointer(penalties.history_N),
        pointer(penalties.starts_R1),
        pointer(penalties.prompt_lens_R),
        pointer(penalties.repetition_R),
        pointer(penalties.presence_R),
        pointer(penalties.frequency_R),
        num_rows,
    )


def _check(penalties: PenaltyRows, num_rows: int) -> None:
    require_dtype("rows", penalties.rows_R, torch.int64)
    require_dtype("history", penalties.history_N, torch.int64)
    require_dtype("starts", penalties.starts_R1, torch.int64)
    require_shape("starts", penalties.starts_R1, num_rows + 1)
    require_dtype("prompt_lens", penalties.prompt_lens_R, torch.int64)
    require_shape("prompt_lens", penalties.prompt_lens_R, num_rows)
    for name, values_R in (
        ("repetition", penalties.repetition_R),
        ("presence", penalties.presence_R),
        ("frequency", penalties.frequency_R),
    ):
        require_dtype(name, values_R, torch.float32)
        require_shape(name, values_R, num_rows)


@jit
def _penalise_rows(
    logits_at: Pointer,
    logits_shape: tuple[int, int],
    rows_at: Pointer,
    history_at: Pointer,
    starts_at: Pointer,
    prompt_lens_at: Pointer,
    repetition_at: Pointer,
    presence_at: Pointer,
    frequency_at: Pointer,
    num_rows: int,
) -> None:
    history = flat(history_at, 0)
    rows, starts, prompt_lens = flat(rows_at, 0), flat(starts_at, 0), flat(prompt_lens_at, 0)
    repetition, presence, frequency = (
        flat(repetition_at, 0),
        flat(presence_at, 0),
        flat(frequency_at, 0),
    )
    row_stride, vocab_size = logits_shape
    output_counts: Array = np.full(vocab_size, _NOT_SEEN, dtype=np.int32)
    for index in range(num_rows):
        start, stop = starts[index], starts[index + 1]
        logits_V = flat(logits_at, rows[index] * row_stride)
        _count(history, start, stop, start + prompt_lens[index], output_counts)
        for i in range(start, stop):
            token = history[i]
            count = int(output_counts[token])
            # Resetting the count makes this the token's only turn, and clears it for the next row.
            output_counts[token] = _NOT_SEEN
            if count != _NOT_SEEN:
                logit = logits_V[token]
                penalty = repetition[index]
                logit = logit / penalty if logit > ZERO else logit * penalty
                if count > 0:
                    logit -= presence[index] + float32(count) * frequency[index]
                logits_V[token] = logit


@jit
def _count(history: Array, start: int, stop: int, output_start: int, output_counts: Array) -> None:
    """Occurrences in the output of every token of the history; 0 for one of the prompt only."""
    for i in range(start, stop):
        token = history[i]
        seen = max(output_counts[token], 0)
        output_counts[token] = seen + 1 if i >= output_start else seen
