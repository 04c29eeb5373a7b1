import dataclasses

import pytest
import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from kernel_cases import assert_near
from pageray.kernels import reference
from pageray.kernels.ops import Ops, PenaltyRows

History = tuple[list[int], list[int]]
"""Prompt and output."""


def penalty_rows(
    histories: list[History],
    rows: list[int],
    settings: list[tuple[float, float, float]],
    device: torch.device,
) -> PenaltyRows:
    """settings: (repetition, presence, frequency)."""
    tokens = [prompt + output for prompt, output in histories]
    ends = torch.tensor([0, *(len(history) for history in tokens)]).cumsum(0)
    repetition_R, presence_R, frequency_R = torch.tensor(settings).T.contiguous().to(device)
    return PenaltyRows(
        rows_R=torch.tensor(rows, device=device),
        history_N=torch.tensor(
            [token for history in tokens for token in history], dtype=torch.int64, device=device
        ),
        starts_R1=ends.to(device),
        prompt_lens_R=torch.tensor([len(prompt) for prompt, _ in histories], device=device),
        repetition_R=repetition_R,
        presence_R=presence_R,
        frequency_R=frequency_R,
    )


HISTORIES: list[History] = [([1, 2, 2, 3], [3, 4, 4, 4]), ([], [7]), ([5, 5], []), ([0], [0, 9, 0])]
SETTINGS = [(1.3, 0.5, 0.25), (1.0, -1.5, 2.0), (0.7, 2.0, 2.0), (2.0, 0.0, -0.5)]


def test_penalties(ops: Ops, device: torch.device, rng: torch.Generator) -> None:
    logits_RV = torch.randn(6, 10, generator=rng).to(device)
    expected = logits_RV.clone()
    penalties = penalty_rows(HISTORIES, [5, 0, 2, 3], SETTINGS, device)
    ops.apply_penalties(logits_RV, penalties)
    reference.OPS.apply_penalties(expected, penalties)
    assert_near(logits_RV, expected)


def test_reference_repetition_equals_transformers(rng: torch.Generator) -> None:
    logits_RV = torch.randn(1, 10, generator=rng)
    penalties = penalty_rows([([1, 2, 2], [3])], [0], [(1.7, 0.0, 0.0)], torch.device("cpu"))
    processor = RepetitionPenaltyLogitsProcessor(penalty=1.7)
    expected: Tensor = processor(
        torch.tensor([[1, 2, 2, 3]]),  # pyright: ignore[reportArgumentType]
        logits_RV.clone(),  # pyright: ignore[reportArgumentType]
    )
    reference.OPS.apply_penalties(logits_RV, penalties)
    torch.testing.assert_close(logits_RV, expected)


def test_reference_presence_and_frequency_by_hand() -> None:
    logits_RV = torch.ones(1, 5)
    histories = [([0, 1], [1, 2, 2, 2])]
    penalties = penalty_rows(histories, [0], [(1.0, 0.5, 0.25)], torch.device("cpu"))
    reference.OPS.apply_penalties(logits_RV, penalties)
    # Only output counts: token 0 is free, token 1 occurred once, token 2 three times.
    assert logits_RV[0].tolist() == [1.0, 0.25, -0.25, 1.0, 1.0]


def test_repetition_comes_first(ops: Ops, device: torch.device) -> None:
    logits_RV = torch.tensor([[4.0, -4.0, 0.0]], device=device)
    penalties = penalty_rows([([], [0, 1, 2])], [0], [(2.0, 1.0, 0.0)], device)
    ops.apply_penalties(logits_RV, penalties)
    assert logits_RV[0].tolist() == [1.0, -9.0, -1.0]


def test_infinite_logits_stay_infinite(ops: Ops, device: torch.device) -> None:
    logits_RV = torch.tensor([[torch.inf, -torch.inf, torch.nan]], device=device)
    penalties = penalty_rows([([], [0, 1, 2])], [0], [(2.0, 1.0, 1.0)], device)
    ops.apply_penalties(logits_RV, penalties)
    assert logits_RV[0, :2].tolist() == [torch.inf, -torch.inf]
    assert logits_RV[0, 2].isnan()


def test_a_token_outside_the_vocabulary_is_refused_before_anything_changes() -> None:
    from pageray.kernels import cpu

    logits_RV = torch.ones(1, 4)
    penalties = penalty_rows([([0], [4])], [0], [(2.0, 1.0, 1.0)], torch.device("cpu"))
    with pytest.raises(ValueError, match=r"history\[1\] is 4; it must be in 0 .. 3"):
        cpu.OPS.apply_penalties(logits_RV, penalties)
    assert torch.equal(logits_RV, torch.ones(1, 4))
    shorter = dataclasses.replace(penalties, prompt_lens_R=torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="prompt_lens"):
        cpu.OPS.apply_penalties(logits_RV, shorter)
