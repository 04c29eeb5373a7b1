"""Small random models on disk, and what transformers says about them."""

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

SMALL_SIZES: dict[str, int] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 70,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

LLAMA3_ROPE: dict[str, str | float] = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def llama_config(**overrides: object) -> PreTrainedConfig:
    return LlamaConfig.from_dict({**SMALL_SIZES, "tie_word_embeddings": True, **overrides})


def mistral_config(**overrides: object) -> PreTrainedConfig:
    return MistralConfig.from_dict({**SMALL_SIZES, "sliding_window": 7, **overrides})


def qwen2_config(**overrides: object) -> PreTrainedConfig:
    return Qwen2Config.from_dict({**SMALL_SIZES, **overrides})


def qwen3_config(**overrides: object) -> PreTrainedConfig:
    return Qwen3Config.from_dict({**SMALL_SIZES, "head_dim": 16, **overrides})


def save_small_model(folder: Path, config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A model of this config with random weights, in float32, saved to `folder`.

    Biases and norms are random too: as transformers initialises them, at 0 and 1, leaving them
    out would go unnoticed.
    """
    generator = torch.Generator().manual_seed(seed)
    model = cast(
        "PreTrainedModel",
        AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval(),
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1.0 + 0.2 * noise if "norm" in name else 0.2 * noise)
    model.save_pretrained(folder)
    return model


def reference_logits(model: PreTrainedModel, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    """transformers' float32 logits [length, vocab_size] of every position of each prompt."""
    with torch.inference_mode():
        return [model(torch.tensor([list(prompt)])).logits[0].float() for prompt in prompts]


def random_prompts(vocab_size: int, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths
    ]
