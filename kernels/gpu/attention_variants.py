"""Ways to specialise the attention kernels, each to be compiled beside a model's plain ones."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class AttentionVariant:
    """What differs from the plain launches of a model shape."""

    name: str
    softcap: float = 0.0
    has_sinks: bool = False
    window: int | None = None
    """None: the model's own."""
    block_size: int = 16
    kv_dtype: torch.dtype | None = None
    """None: that of the activations."""


PLAIN = AttentionVariant(name="")
BLOCKS_OF_128 = AttentionVariant(name="blocks of 128", block_size=128)
CAPPED = AttentionVariant(name="cap sinks window", softcap=50.0, has_sinks=True, window=512)
FP8_KV = AttentionVariant(name="fp8", kv_dtype=torch.float8_e4m3fn)
FP8_KV_CAPPED = AttentionVariant(
    name="fp8 cap sinks",
    softcap=50.0,
    has_sinks=True,
    block_size=64,
    kv_dtype=torch.float8_e4m3fn,
)
VARIANTS = (BLOCKS_OF_128, CAPPED, FP8_KV, FP8_KV_CAPPED)
