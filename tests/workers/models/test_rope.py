"""The cosine and sine table equals transformers', for every variant."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from model_folder import LLAMA3_ROPE, llama_config
from pageray.workers.models.rope import cos_sin_table
from pageray.workers.models.spec import ModelSpec

MAX_POSITION = 4096

YARN: dict[str, object] = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
}

VARIANTS: dict[str, dict[str, object]] = {
    "default": {"rope_type": "default", "rope_theta": 500_000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.5},
    "llama3": {**LLAMA3_ROPE, "rope_theta": 500_000.0, "original_max_position_embeddings": 512},
    "yarn": YARN,
    "yarn, exact ramp": {**YARN, "truncate": False, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn, given attention factor": {**YARN, "attention_factor": 0.7},
    "yarn, two mscales": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
}


@pytest.mark.parametrize("rope", VARIANTS.values(), ids=VARIANTS.keys())
def test_table_is_that_of_transformers(rope: dict[str, object], tmp_path: Path) -> None:
    config = llama_config(
        head_dim=64, rope_parameters=dict(rope), max_position_embeddings=MAX_POSITION
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    spec = ModelSpec.from_folder(tmp_path)
    table = cos_sin_table(spec.rope, spec.rotary_dim, spec.max_position)

    positions = torch.arange(MAX_POSITION).unsqueeze(0)
    assert isinstance(config, LlamaConfig)
    cos, sin = LlamaRotaryEmbedding(config=config)(torch.zeros(1), positions)
    expected = torch.cat((cos[0, :, :32], sin[0, :, :32]), dim=1)
    assert table.dtype == torch.float32
    torch.testing.assert_close(table, expected, atol=5e-4, rtol=0)
