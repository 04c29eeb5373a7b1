"""`LlamaModel` gives transformers' logits, for every architecture and tensor-parallel degree."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
)

from model_folder import (
    LLAMA3_ROPE,
    llama_config,
    mistral_config,
    qwen2_config,
    qwen3_config,
    random_prompts,
    reference_logits,
    save_small_model,
)
from paged_forward import Pages, load_shard, paged_logits
from rank_processes import logits_of_ranks

PROMPT_LENGTHS = (23, 1, 12)

CONFIGS = {
    "llama tied": llama_config(),
    "llama untied, biases": llama_config(
        tie_word_embeddings=False, attention_bias=True, mlp_bias=True
    ),
    "llama, llama3 rope": llama_config(rope_parameters=LLAMA3_ROPE),
    "llama, multi-head": llama_config(num_key_value_heads=6),
    "mistral, window below the prompt": mistral_config(),
    "qwen2": qwen2_config(),
    "qwen2 tied, windows from layer 1": qwen2_config(
        tie_word_embeddings=True, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "qwen3": qwen3_config(),
    "qwen3 tied, biases": qwen3_config(tie_word_embeddings=True, attention_bias=True),
}


def assert_all_close(actual: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    assert [part.shape for part in actual] == [part.shape for part in expected]
    torch.testing.assert_close(
        torch.cat(actual), torch.cat(expected), atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_logits_are_those_of_transformers(config: PreTrainedConfig, tmp_path: Path) -> None:
    reference = save_small_model(tmp_path, config)
    prompts = random_prompts(101, PROMPT_LENGTHS)
    actual = paged_logits(*load_shard(tmp_path), prompts)
    assert_all_close(actual, reference_logits(reference, prompts), 1e-4)


def test_no_logit_rows_still_writes_kv(tmp_path: Path) -> None:
    """A chunk in the middle of a prompt asks for no logits; the tokens after it need its KV."""
    reference = save_small_model(tmp_path, llama_config())
    [prompt] = random_prompts(101, (11,))
    model, shard = load_shard(tmp_path)
    pages = Pages(model.spec, shard, [prompt], block_size=4)
    nothing = pages.step(model, [prompt], [(0, 0, 8)], logit_rows=[])
    assert nothing is not None
    assert nothing.shape == (0, 101)
    last = pages.step(model, [prompt], [(0, 8, 11)], logit_rows=[2])
    assert last is not None
    [expected] = reference_logits(reference, [prompt])
    assert_all_close([last], [expected[-1:]], 1e-4)


@pytest.mark.parametrize("chunk_tokens", [1, 4, 64])
def test_chunking_does_not_change_the_logits(chunk_tokens: int, tmp_path: Path) -> None:
    reference = save_small_model(tmp_path, mistral_config())
    prompts = random_prompts(101, PROMPT_LENGTHS)
    actual = paged_logits(*load_shard(tmp_path), prompts, chunk_tokens=chunk_tokens)
    assert_all_close(actual, reference_logits(reference, prompts), 1e-4)


# 9 query and 3 KV heads: 2 + 1 groups in two ranks, a KV head on two of four ranks. Neither the
# vocabulary (101) nor the MLP (70) divides evenly; biases show if more than one rank adds them.
UNEVEN = {"hidden_size": 72, "num_attention_heads": 9, "attention_bias": True}


@pytest.mark.parametrize(
    ("tp_size", "config"),
    [
        (2, qwen3_config(**UNEVEN, tie_word_embeddings=False)),
        (3, llama_config(**UNEVEN, mlp_bias=True, tie_word_embeddings=False)),
        (4, llama_config(**UNEVEN, mlp_bias=True, tie_word_embeddings=True)),
    ],
)
def test_every_degree_gives_the_same_logits(
    tp_size: int, config: PreTrainedConfig, tmp_path: Path
) -> None:
    reference = save_small_model(tmp_path / "model", config)
    prompts = random_prompts(101, PROMPT_LENGTHS)
    actual = logits_of_ranks(tmp_path / "model", prompts, tp_size, tmp_path)
    assert_all_close(actual, reference_logits(reference, prompts), 1e-4)


def test_pages_of_8_bits_change_the_logits_a_little(tmp_path: Path) -> None:
    save_small_model(tmp_path, llama_config())
    model, shard = load_shard(tmp_path)
    prompts = random_prompts(101, (17, 9))
    exact = torch.cat(paged_logits(model, shard, prompts))
    rounded = torch.cat(paged_logits(model, shard, prompts, kv_dtype=torch.float8_e4m3fn))
    error = float((rounded - exact).square().mean() / exact.square().mean()) ** 0.5
    assert 1e-3 < error < 0.2


def test_smollm2_logits_are_those_of_transformers(smollm2_folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2_folder / "tokenizer.json"))
    prompts = [
        tokenizer.encode("The quick brown fox jumps over the lazy dog, and then").ids,
        tokenizer.encode("def fibonacci(n):\n    if n < 2:").ids,
    ]
    reference = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32)
    actual = paged_logits(*load_shard(smollm2_folder), prompts, block_size=16, chunk_tokens=9)
    assert_all_close(actual, reference_logits(reference, prompts), 2e-4)


def test_smollm2_in_two_uneven_ranks(smollm2_folder: Path, tmp_path: Path) -> None:
    prompts = random_prompts(49152, (7, 3))
    expected = paged_logits(*load_shard(smollm2_folder), prompts)
    assert_all_close(logits_of_ranks(smollm2_folder, prompts, 2, tmp_path), expected, 2e-4)
