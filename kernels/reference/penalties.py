"""Repetition, presence and frequency penalties.

Repetition (Keskar et al. 2019, arXiv:1909.05858): positive logits are divided, negative ones
multiplied. Presence and frequency (OpenAI API): logit -= presence + count * frequency.
"""

from typing import cast

import torch
from torch import Tensor

from pageray.kernels.ops import PenaltyRows


def apply_penalties(logits_RV: Tensor, penalties: PenaltyRows) -> None:
    """Change the named rows of float32 logits in place."""
    rows = cast("list[int]", penalties.rows_R.tolist())
    starts = cast("list[int]", penalties.starts_R1.tolist())
    prompt_lens = cast("list[int]", penalties.prompt_lens_R.tolist())
    for index, row in enumerate(rows):
        history = penalties.history_N[starts[index] : starts[index + 1]]
        logits_V = logits_RV[row]
        seen = _counts(history)[0]
        repetition = penalties.repetition_R[index]
        values = logits_V[seen]
        logits_V[seen] = torch.where(values > 0, values / repetition, values * repetition)
        output, counts = _counts(history[prompt_lens[index] :])
        logits_V[output] -= penalties.presence_R[index] + counts * penalties.frequency_R[index]


def _counts(token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct token ids, and how often each occurs."""
    return cast("tuple[Tensor, Tensor]", torch.unique(token_ids, return_counts=True))
