"""Rotary position embeddings: the angles, with the scalings that stretch a context.

RoPE: Su et al. 2021, arXiv:2104.09864. Pair i of R dims turns by position * theta^(-2i / R).
Everything is computed in float32 in the order transformers uses, because float32 angles at large
positions depend on it.
"""

import math
from dataclasses import dataclass
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from pageray.cluster.errors import ModelLoadError
from pageray.workers.models.hub_config import HubConfig, RopeConfig, rope_config

RopeVariant = Literal["default", "linear", "llama3", "yarn"]

DEFAULT_THETA = 10_000.0
"""transformers' value for the config files that predate `rope_theta`."""


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """A RoPE variant and its settings; those a variant does not use stay at their defaults."""

    variant: RopeVariant
    theta: float
    factor: float = 1.0
    """By how much the context is stretched."""
    original_max_position: int = 0
    """Context length, in tokens, of the training that the stretching starts from."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    """Multiplies cosines and sines, so the attention scores by its square."""


def rope_spec(config: HubConfig) -> RopeSpec:
    """The RoPE settings of a model. Raises `ModelLoadError` for a variant that is not supported
    ("dynamic" and "longrope" change the angles of cached keys as a sequence grows, so pages could
    not be shared) or that lacks one of its settings."""
    settings = rope_config(config)
    variant = settings.rope_type or settings.type or "default"
    if variant not in get_args(RopeVariant):
        raise ModelLoadError(
            f"RoPE variant {variant!r} is not supported; {', '.join(get_args(RopeVariant))} are."
        )
    theta = settings.rope_theta or config.rope_theta or DEFAULT_THETA
    if variant == "default":
        return RopeSpec(variant="default", theta=theta)
    original = (
        config.original_max_position_embeddings
        or settings.original_max_position_embeddings
        or config.max_position_embeddings
    )
    factor = _required(settings.factor, variant, "factor")
    if variant == "llama3":
        return RopeSpec(
            variant="llama3",
            theta=theta,
            factor=factor,
            original_max_position=original,
            low_freq_factor=_required(settings.low_freq_factor, variant, "low_freq_factor"),
            high_freq_factor=_required(settings.high_freq_factor, variant, "high_freq_factor"),
        )
    if variant == "yarn":
        return RopeSpec(
            variant="yarn",
            theta=theta,
            factor=factor,
            original_max_position=original,
            beta_fast=settings.beta_fast or 32.0,
            beta_slow=settings.beta_slow or 1.0,
            truncate=settings.truncate,
            attention_factor=_yarn_attention_factor(settings, factor),
        )
    return RopeSpec(variant=cast("RopeVariant", variant), theta=theta, factor=factor)


def _required(value: float | None, variant: str, key: str) -> float:
    if value is None:
        raise ModelLoadError(f"config.json: RoPE variant {variant!r} needs the setting {key!r}.")
    return value


def _yarn_attention_factor(settings: RopeConfig, factor: float) -> float:
    """Peng et al. 2023, arXiv:2309.00071, section 3.4: 0.1 ln(factor) + 1; DeepSeek's files give
    the two weights of a ratio instead."""
    if settings.attention_factor is not None:
        return settings.attention_factor

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    if settings.mscale and settings.mscale_all_dim:
        return mscale(settings.mscale) / mscale(settings.mscale_all_dim)
    return mscale(1.0)


def cos_sin_table(rope: RopeSpec, rotary_dim: int, max_position: int) -> Tensor:
    """float32 [max_position, rotary_dim]: row p has the cosines of p's angles, then their sines."""
    inv_freq_F = _inverse_frequencies(rope, rotary_dim)
    positions_L = torch.arange(max_position, dtype=torch.float32)
    angles_LF = torch.outer(positions_L, inv_freq_F)
    return torch.cat((angles_LF.cos(), angles_LF.sin()), dim=1) * rope.attention_factor


def _inverse_frequencies(rope: RopeSpec, rotary_dim: int) -> Tensor:
    """float32 [rotary_dim / 2]: radians per position of each pair."""
    exponents_F = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    inv_freq_F = 1.0 / rope.theta**exponents_F
    match rope.variant:
        case "default":
            return inv_freq_F
        case "linear":
            return inv_freq_F / rope.factor
        case "llama3":
            return _llama3(rope, inv_freq_F)
        case "yarn":
            return _yarn(rope, inv_freq_F, rotary_dim)


def _llama3(rope: RopeSpec, inv_freq_F: Tensor) -> Tensor:
    """Llama 3.1 (Grattafiori et al. 2024, arXiv:2407.21783): long waves are stretched by the
    factor, short ones kept, and those between are blended by how often they turn in the original
    context."""
    turns_F = rope.original_max_position * inv_freq_F / (2 * math.pi)
    blend_F = (turns_F - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend_F = blend_F.clamp(0.0, 1.0)
    return (1.0 - blend_F) * inv_freq_F / rope.factor + blend_F * inv_freq_F


def _yarn(rope: RopeSpec, inv_freq_F: Tensor, rotary_dim: int) -> Tensor:
    """YaRN's NTK-by-parts (arXiv:2309.00071, section 3.2): pairs that turn more than beta_fast
    times in the original context are kept, those below beta_slow stretched, a ramp between."""

    def pair_that_turns(turns: float) -> float:
        wavelength = rope.original_max_position / (turns * 2 * math.pi)
        return rotary_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    width = max(high - low, 0.001)
    pairs_F = torch.arange(rotary_dim // 2, dtype=torch.float32)
    stretch_F = ((pairs_F - low) / width).clamp(0.0, 1.0)
    return inv_freq_F / rope.factor * stretch_F + inv_freq_F * (1.0 - stretch_F)
