"""config.json and generation_config.json as Hugging Face writes them, decoded with their types.

Only the keys that matter here are listed; others are ignored. Both the transformers 4 form
(`rope_theta`, `rope_scaling`, `torch_dtype`) and the transformers 5 form (`rope_parameters`,
`dtype`) are read.
"""

from pathlib import Path
from typing import TypeVar

import msgspec

from pageray.cluster.errors import ModelLoadError

TokenIds = int | list[int] | None


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`rope_parameters` (transformers 5) or `rope_scaling` (transformers 4)."""

    rope_type: str | None = None
    type: str | None = None
    """The name of `rope_type` in old files."""
    rope_theta: float | None = None
    partial_rotary_factor: float | None = None
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


class HubConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of config.json that decide how the supported architectures compute."""

    architectures: list[str]
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    rope_theta: float | None = None
    partial_rotary_factor: float | None = None
    rope_scaling: dict[str, object] | None = None
    rope_parameters: dict[str, object] | None = None
    original_max_position_embeddings: int | None = None
    sliding_window: int | msgspec.UnsetType | None = msgspec.UNSET
    use_sliding_window: bool = False
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    quantization_config: dict[str, object] | None = None
    bos_token_id: int | None = None
    eos_token_id: TokenIds = None


class GenerationConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of generation_config.json that matter here."""

    bos_token_id: int | None = None
    eos_token_id: TokenIds = None


def read_hub_config(folder: Path) -> HubConfig:
    """Raises `ModelLoadError` when config.json is absent, is no JSON, lacks a key, or has a value
    of the wrong type."""
    return _read(folder / "config.json", HubConfig)


def read_generation_config(folder: Path) -> GenerationConfig:
    """All `None` when the folder has no generation_config.json. Errors as `read_hub_config`."""
    path = folder / "generation_config.json"
    return _read(path, GenerationConfig) if path.is_file() else GenerationConfig()


def rope_config(config: HubConfig) -> RopeConfig:
    """The RoPE settings, from whichever form the file has.

    Raises `ModelLoadError` for settings that differ per layer type, and for wrong types.
    """
    values = config.rope_parameters or config.rope_scaling or {}
    nested = [key for key, value in values.items() if isinstance(value, dict)]
    if nested:
        raise ModelLoadError(
            f"config.json has RoPE settings per layer type ({', '.join(nested)}); "
            "only one setting for all layers is supported."
        )
    try:
        return msgspec.convert(values, RopeConfig)
    except msgspec.ValidationError as error:
        raise ModelLoadError(f"config.json, RoPE settings: {error}.") from error


Config = TypeVar("Config", bound=msgspec.Struct)


def _read(path: Path, config_type: type[Config]) -> Config:
    try:
        return msgspec.json.decode(path.read_bytes(), type=config_type)
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error}.") from error
    except msgspec.DecodeError as error:
        raise ModelLoadError(f"{path}: {error}.") from error
