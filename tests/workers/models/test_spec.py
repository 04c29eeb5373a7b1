"""`ModelSpec`: both forms of config.json, each architecture's rules, and what is refused."""

import json
from pathlib import Path

import pytest
from transformers import PreTrainedConfig

from model_folder import LLAMA3_ROPE, llama_config, mistral_config, qwen2_config, qwen3_config
from pageray.cluster.errors import ModelLoadError
from pageray.workers.models.spec import ModelSpec

BASE: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"]}


def spec_of(folder: Path, **overrides: object) -> ModelSpec:
    values = {key: value for key, value in {**BASE, **overrides}.items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(values))
    return ModelSpec.from_folder(folder)


def test_both_config_forms_say_the_same(tmp_path: Path) -> None:
    scaling = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    old = spec_of(tmp_path, rope_theta=100.0, rope_scaling=scaling, torch_dtype="bfloat16")
    new = spec_of(tmp_path, rope_parameters=LLAMA3_ROPE, dtype="bfloat16")
    assert old == new
    assert (new.rope.variant, new.rope.theta, new.rope.factor) == ("llama3", 100.0, 4.0)
    assert new.rope.original_max_position == 16
    assert new.dtype == "bfloat16"


def test_absent_keys_take_transformers_defaults(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, num_key_value_heads="absent")
    assert (spec.num_kv_heads, spec.head_dim, spec.rotary_dim) == (8, 8, 8)
    assert (spec.rope.variant, spec.rope.theta) == ("default", 10_000.0)
    assert not spec.tie_word_embeddings
    assert spec.dtype == "float32"


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (2, None, (2,)),
        ([2, 3], None, (2, 3)),
        (2, [4, 5], (4, 5)),
        (None, 7, (7,)),
        (None, None, ()),
    ],
)
def test_eos_ids_of_the_generation_config_win(
    config: object, generation: object, expected: tuple[int, ...], tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert spec_of(tmp_path, eos_token_id=config).eos_token_ids == expected


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"sliding_window": 8}, (0, 0, 0, 0)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 8}, (8, 8, 8, 8)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, (0, 0, 0, 0)),
        ({"architectures": ["MistralForCausalLM"]}, (4096,) * 4),
        ({**QWEN2, "sliding_window": 8}, (0, 0, 0, 0)),
        (
            {**QWEN2, "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3},
            (0, 0, 0, 8),
        ),
        (
            {
                **QWEN2,
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (8, 0, 8, 0),
        ),
    ],
)
def test_layer_windows(
    overrides: dict[str, object], expected: tuple[int, ...], tmp_path: Path
) -> None:
    assert spec_of(tmp_path, **overrides).layer_windows == expected


@pytest.mark.parametrize(
    ("config", "biases", "has_qk_norm", "head_dim"),
    [
        (llama_config(attention_bias=True), (True, True, False), False, 8),
        (llama_config(mlp_bias=True), (False, False, True), False, 8),
        (mistral_config(), (False, False, False), False, 8),
        (qwen2_config(), (True, False, False), False, 8),
        (qwen3_config(), (False, False, False), True, 16),
        (qwen3_config(attention_bias=True), (True, True, False), True, 16),
    ],
)
def test_architectures_differ_in_biases_and_norms(
    config: PreTrainedConfig,
    biases: tuple[bool, bool, bool],
    has_qk_norm: bool,
    head_dim: int,
    tmp_path: Path,
) -> None:
    config.architectures = [type(config).__name__.replace("Config", "ForCausalLM")]
    config.save_pretrained(tmp_path)
    spec = ModelSpec.from_folder(tmp_path)
    assert (spec.qkv_bias, spec.attention_output_bias, spec.mlp_bias) == biases
    assert spec.has_qk_norm == has_qk_norm
    assert spec.head_dim == head_dim


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r"GPT2LMHeadModel.*LlamaForCausalLM.*Qwen3"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, r"dynamic.*llama3"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'factor'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "full_attention"),
        ({"rope_parameters": {"rope_theta": "big"}}, "rope_theta"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"vocab_size": "absent"}, "vocab_size"),
        ({"dtype": "float8"}, "float8"),
        ({**QWEN2, "use_sliding_window": True, "layer_types": ["full_attention"]}, "1 entries"),
    ],
)
def test_refusals_name_what_is_wrong(
    overrides: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        spec_of(tmp_path, **overrides)


def test_absent_or_broken_config_file(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json cannot be read"):
        ModelSpec.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        ModelSpec.from_folder(tmp_path)


def test_smollm2(smollm2_folder: Path) -> None:
    spec = ModelSpec.from_folder(smollm2_folder)
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (30, 9, 3, 64)
    assert (spec.vocab_size, spec.max_position, spec.rope.theta) == (49152, 8192, 100_000.0)
    assert (spec.rms_norm_eps, spec.eos_token_ids, spec.dtype) == (1e-5, (2,), "bfloat16")
    assert spec.tie_word_embeddings
