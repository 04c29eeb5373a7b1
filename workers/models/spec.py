"""What a model is, as far as serving it goes: `ModelSpec`, read from a Hugging Face folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

import msgspec

from pageray.cluster.errors import ModelLoadError
from pageray.workers.models.hub_config import (
    HubConfig,
    TokenIds,
    read_generation_config,
    read_hub_config,
    rope_config,
)
from pageray.workers.models.rope import RopeSpec, rope_spec

Architecture = Literal[
    "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"
]
WeightDtype = Literal["float32", "bfloat16", "float16"]

# What transformers takes when config.json leaves these out.
_QWEN3_DEFAULT_HEAD_DIM = 128
_DEFAULT_SLIDING_WINDOW = 4096


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Sizes and switches of a decoder-only model of the Llama family."""

    architecture: Architecture
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    """Context length in tokens."""
    rms_norm_eps: float
    rope: RopeSpec
    rotary_dim: int
    """The first dims of a head that RoPE turns; the rest pass through."""
    tie_word_embeddings: bool
    """The LM head is the embedding matrix."""
    qkv_bias: bool
    attention_output_bias: bool
    mlp_bias: bool
    has_qk_norm: bool
    """q and k of every head are RMS-normalised before RoPE."""
    layer_windows: tuple[int, ...]
    """Sliding window of each layer in tokens; 0: full attention."""
    dtype: WeightDtype
    """What the weights were trained and saved in."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_folder(cls, folder: Path) -> "ModelSpec":
        """Read config.json and, where there is one, generation_config.json (whose EOS ids win).

        Raises `ModelLoadError` for an architecture, activation, quantisation or RoPE variant that
        is not supported, and for files that are absent or malformed.
        """
        config = read_hub_config(folder)
        architecture = _architecture(config)
        _reject_unsupported(config)
        generation = read_generation_config(folder)
        head_dim = _head_dim(config, architecture)
        has_bias_switch = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM")
        return cls(
            architecture=architecture,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
            head_dim=head_dim,
            vocab_size=config.vocab_size,
            max_position=config.max_position_embeddings,
            rms_norm_eps=config.rms_norm_eps,
            rope=rope_spec(config),
            rotary_dim=_rotary_dim(config, head_dim),
            tie_word_embeddings=config.tie_word_embeddings,
            qkv_bias=architecture == "Qwen2ForCausalLM"
            or (has_bias_switch and config.attention_bias),
            attention_output_bias=has_bias_switch and config.attention_bias,
            mlp_bias=architecture == "LlamaForCausalLM" and config.mlp_bias,
            has_qk_norm=architecture == "Qwen3ForCausalLM",
            layer_windows=_layer_windows(config, architecture),
            dtype=_dtype(config),
            bos_token_id=generation.bos_token_id
            if generation.bos_token_id is not None
            else config.bos_token_id,
            eos_token_ids=_token_ids(generation.eos_token_id) or _token_ids(config.eos_token_id),
        )


def _architecture(config: HubConfig) -> Architecture:
    for name in config.architectures:
        if name in get_args(Architecture):
            return cast("Architecture", name)
    raise ModelLoadError(
        f"Architecture {', '.join(config.architectures) or '(none)'} is not supported; "
        f"{', '.join(get_args(Architecture))} are."
    )


def _reject_unsupported(config: HubConfig) -> None:
    if config.hidden_act != "silu":
        raise ModelLoadError(f"hidden_act {config.hidden_act!r} is not supported; 'silu' is.")
    if config.quantization_config is not None:
        method = config.quantization_config.get("quant_method", "unknown")
        raise ModelLoadError(
            f"The weights are quantised (method {method}), which is not supported. "
            "Use the float32, bfloat16 or float16 version of the model."
        )


def _head_dim(config: HubConfig, architecture: Architecture) -> int:
    if config.head_dim is not None:
        return config.head_dim
    if architecture == "Qwen3ForCausalLM":
        return _QWEN3_DEFAULT_HEAD_DIM
    return config.hidden_size // config.num_attention_heads


def _rotary_dim(config: HubConfig, head_dim: int) -> int:
    factor = rope_config(config).partial_rotary_factor or config.partial_rotary_factor or 1.0
    return int(head_dim * factor)


def _layer_windows(config: HubConfig, architecture: Architecture) -> tuple[int, ...]:
    """Mistral: one window for all layers. Qwen: `layer_types`, or the layers from
    `max_window_layers` on, and only with `use_sliding_window`. Llama: none."""
    configured = config.sliding_window
    window = _DEFAULT_SLIDING_WINDOW if configured is msgspec.UNSET else configured or 0
    num_layers = config.num_hidden_layers
    if architecture == "MistralForCausalLM":
        return (window,) * num_layers
    if architecture == "LlamaForCausalLM" or not config.use_sliding_window:
        return (0,) * num_layers
    if config.layer_types is None:
        first = min(config.max_window_layers, num_layers)
        return (0,) * first + (window,) * (num_layers - first)
    if len(config.layer_types) != num_layers:
        raise ModelLoadError(
            f"config.json: layer_types has {len(config.layer_types)} entries for "
            f"{num_layers} layers."
        )
    return tuple(window if kind == "sliding_attention" else 0 for kind in config.layer_types)


def _dtype(config: HubConfig) -> WeightDtype:
    name = config.dtype or config.torch_dtype or "float32"
    if name not in get_args(WeightDtype):
        raise ModelLoadError(
            f"config.json: dtype {name!r} is not supported; {', '.join(get_args(WeightDtype))} are."
        )
    return cast("WeightDtype", name)


def _token_ids(value: TokenIds) -> tuple[int, ...]:
    match value:
        case None:
            return ()
        case int():
            return (value,)
        case list():
            return tuple(value)
