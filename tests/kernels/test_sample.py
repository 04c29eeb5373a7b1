import math

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kernel_cases import SamplingSettings, sampling_rows
from pageray.kernels import reference
from pageray.kernels.ops import Ops
from pageray.kernels.reference.sample import kept_tokens, relative_weights

EDGE = 1e-5
"""Fast kernels weigh tokens in float32: this close to a boundary either side of it is right."""
ALL = SamplingSettings()
GREEDY = SamplingSettings(temperature=0.0)


def draws(count: int, generator: torch.Generator) -> Tensor:
    return torch.rand(count, generator=generator, dtype=torch.float64)


def sample_all(
    ops: Ops, logits: list[float], settings: SamplingSettings, device: torch.device
) -> set[int]:
    """The tokens that 17 even draws, the ends of [0, 1) included, reach: all above p = 1 / 16."""
    uniform_R = torch.linspace(0, 1, 17, dtype=torch.float64, device=device)
    uniform_R[-1] = 1 - 2.0**-53
    logits_RV = torch.tensor(logits, device=device).repeat(17, 1)
    return {int(token) for token in ops.sample(logits_RV, sampling_rows(uniform_R, settings))}


def assert_draws_fit(
    tokens_R: Tensor, logits_RV: Tensor, uniform_R: Tensor, settings: SamplingSettings
) -> None:
    """Each token is kept, and its share of the kept mass, in id order, contains the draw."""
    for row in range(len(tokens_R)):
        token = int(tokens_R[row])
        weights_V = relative_weights(logits_RV[row], settings.temperature)
        is_kept_V = kept_tokens(
            logits_RV[row],
            weights_V,
            top_k=settings.top_k,
            top_p=settings.top_p,
            min_p=settings.min_p,
        )
        assert is_kept_V[token]
        shares_V = torch.where(is_kept_V, weights_V, 0.0)
        ends_V = (shares_V / shares_V.sum()).cumsum(dim=0)
        start = 0.0 if token == 0 else float(ends_V[token - 1])
        assert start - EDGE <= float(uniform_R[row]) <= float(ends_V[token]) + EDGE


@pytest.mark.parametrize("vocab_size", [1, 2, 9, 1500])
def test_greedy_takes_the_lowest_id_among_equals(
    ops: Ops, device: torch.device, rng: torch.Generator, vocab_size: int
) -> None:
    # Few distinct values, 0.0 and -0.0 among them: rows have ties.
    logits_RV = torch.randn(4, vocab_size, generator=rng).round() * -0.5
    rows = sampling_rows(draws(4, rng).to(device), GREEDY)
    tokens_R = ops.sample(logits_RV.to(device), rows)
    is_largest = logits_RV == logits_RV.amax(dim=1, keepdim=True)
    assert torch.equal(tokens_R.cpu(), is_largest.int().argmax(dim=1))


@pytest.mark.parametrize("vocab_size", [1, 3, 700])
@pytest.mark.parametrize(
    "settings",
    [
        ALL,
        SamplingSettings(temperature=0.3),
        SamplingSettings(temperature=5.0),
        SamplingSettings(top_k=1),
        SamplingSettings(top_k=5),
        SamplingSettings(top_k=10_000),
        SamplingSettings(top_p=0.9),
        SamplingSettings(top_p=0.05),
        SamplingSettings(min_p=0.1),
        SamplingSettings(min_p=1.0),
        SamplingSettings(temperature=2.0, top_k=20, top_p=0.7, min_p=0.05),
    ],
)
def test_each_draw_falls_into_its_tokens_share(
    ops: Ops,
    device: torch.device,
    rng: torch.Generator,
    vocab_size: int,
    settings: SamplingSettings,
) -> None:
    logits_RV = 2 * torch.randn(5, vocab_size, generator=rng)
    uniform_R = draws(5, rng)
    uniform_R[0], uniform_R[1] = 0.0, 1 - 2.0**-53
    on_device = logits_RV.to(device, copy=True)
    tokens_R = ops.sample(on_device, sampling_rows(uniform_R.to(device), settings))
    assert tokens_R.dtype == torch.int64
    assert torch.equal(on_device.cpu(), logits_RV)
    assert_draws_fit(tokens_R.cpu(), logits_RV, uniform_R, settings)


def test_rows_have_their_own_settings(ops: Ops, device: torch.device, rng: torch.Generator) -> None:
    logits_RV = torch.randn(3, 50, generator=rng).to(device)
    rows = sampling_rows(draws(3, rng).to(device), ALL)
    rows.temperature_R[0] = 0.0
    rows.top_k_R[1] = 1
    tokens_R = ops.sample(logits_RV, rows)
    assert torch.equal(tokens_R[:2], logits_RV[:2].argmax(dim=1))
    assert torch.equal(tokens_R, reference.OPS.sample(logits_RV, rows))


@pytest.mark.parametrize(
    ("settings", "reachable"),
    [
        # Ties of the k-th largest stay; so do tokens equal to the last one that top_p needs.
        (SamplingSettings(top_k=1), {1, 3}),
        (SamplingSettings(top_k=2), {1, 3}),
        (SamplingSettings(top_k=3), {0, 1, 3, 4}),
        (SamplingSettings(top_p=0.01), {1, 3}),
        (SamplingSettings(min_p=1.0), {1, 3}),
        (SamplingSettings(min_p=0.3), {0, 1, 3, 4}),
        (SamplingSettings(), {0, 1, 2, 3, 4}),
    ],
)
def test_ties_stay_together(
    ops: Ops, device: torch.device, settings: SamplingSettings, reachable: set[int]
) -> None:
    logits = [1.0, 2.0, 0.5, 2.0, 1.0]
    assert sample_all(ops, logits, settings, device) == reachable
    assert sample_all(reference.OPS, logits, settings, device) == reachable


@pytest.mark.parametrize(
    ("top_p", "reachable"),
    [(0.45, {0}), (0.55, {0, 1}), (0.74, {0, 1}), (0.76, {0, 1, 2}), (0.99, {0, 1, 2, 3})],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(
    ops: Ops, device: torch.device, top_p: float, reachable: set[int]
) -> None:
    logits = [math.log(p) for p in (0.5, 0.25, 0.15, 0.1)]
    assert sample_all(ops, logits, SamplingSettings(top_p=top_p), device) == reachable


def test_top_p_counts_what_top_k_left(ops: Ops, device: torch.device) -> None:
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    settings = SamplingSettings(top_k=2, top_p=0.56)
    # 0.4 is 0.57 of what top_k leaves, so it suffices; of everything it would not.
    assert sample_all(ops, logits, settings, device) == {0}


@pytest.mark.parametrize("temperature", [1e-3, 1.0, 100.0])
def test_infinite_logits(ops: Ops, device: torch.device, temperature: float) -> None:
    settings = SamplingSettings(temperature=temperature)
    minus, plus, nan = -torch.inf, torch.inf, torch.nan
    assert sample_all(ops, [minus, 1.0, minus, 1.0, minus], settings, device) == {1, 3}
    assert sample_all(ops, [0.0, plus, 5.0, plus], settings, device) == {1, 3}
    assert sample_all(ops, [nan, 0.0, nan, 0.0], settings, device) == {1, 3}
    assert sample_all(ops, [minus, minus], settings, device) == {0, 1}
    assert sample_all(ops, [nan, 0.0, nan, 0.0], GREEDY, device) == {1}
    assert sample_all(ops, [minus, minus], GREEDY, device) == {0}


def test_frequencies_follow_the_probabilities(ops: Ops, device: torch.device) -> None:
    # Triton's interpreter takes 40 ms a row.
    is_interpreted = ops.name == "gpu" and device.type == "cpu"
    num_draws = 150 if is_interpreted else 10_000
    probabilities = torch.tensor([0.4, 0.05, 0.3, 0.05, 0.2], dtype=torch.float64)
    logits_RV = probabilities.log().float().repeat(num_draws, 1).to(device)
    index_R = torch.arange(num_draws, device=device)
    uniform_R = ops.draw_uniform(torch.full_like(index_R, 11), torch.zeros_like(index_R), index_R)
    counts = ops.sample(logits_RV, sampling_rows(uniform_R, ALL)).bincount(minlength=5).cpu()
    expected = probabilities * num_draws
    chi_square = ((counts - expected) ** 2 / expected).sum()
    # 4 degrees of freedom: above 23.5 once in 10,000 samplers that are right.
    assert chi_square < 23.5


@pytest.mark.parametrize(
    ("settings", "processor"),
    [
        (SamplingSettings(top_k=7), TopKLogitsWarper(7)),
        (SamplingSettings(top_p=0.8), TopPLogitsWarper(0.8)),
        (SamplingSettings(min_p=0.07), MinPLogitsWarper(0.07)),
    ],
)
def test_reference_keeps_what_transformers_keeps(
    rng: torch.Generator, settings: SamplingSettings, processor: LogitsProcessor
) -> None:
    logits_V = 2 * torch.randn(300, generator=rng)
    filtered: Tensor = processor(torch.zeros(1, 1), logits_V.unsqueeze(0))  # pyright: ignore[reportArgumentType]
    is_kept_V = kept_tokens(
        logits_V,
        relative_weights(logits_V, 1.0),
        top_k=settings.top_k,
        top_p=settings.top_p,
        min_p=settings.min_p,
    )
    assert torch.equal(is_kept_V, filtered[0] > -torch.inf)


def test_a_large_vocabulary_over_threads(rng: torch.Generator) -> None:
    from pageray.kernels import cpu

    settings = SamplingSettings(temperature=0.8, top_k=40, top_p=0.95)
    logits_RV, uniform_R = 3 * torch.randn(4, 50_000, generator=rng), draws(4, rng)
    tokens_R = cpu.OPS.sample(logits_RV, sampling_rows(uniform_R, settings))
    assert_draws_fit(tokens_R, logits_RV, uniform_R, settings)


def test_rows_of_the_wrong_number_are_refused(ops: Ops, device: torch.device) -> None:
    rows = sampling_rows(torch.zeros(2, device=device), ALL)
    with pytest.raises(ValueError, match="3"):
        ops.sample(torch.zeros(3, 4, device=device), rows)
