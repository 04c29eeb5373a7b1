"""Writes a complete Hugging Face model folder from one llama-architecture GGUF file."""

import json
from pathlib import Path

from gguf import GGUFReader

from pageray.cluster.errors import ModelLoadError
from pageray.workers.model_store.gguf_reading import GgufMetadata
from pageray.workers.model_store.gguf_tokenizer import write_tokenizer
from pageray.workers.model_store.gguf_weights import write_weights


def convert_gguf(gguf_file: Path, into: Path, progress: bool) -> None:
    """Fill the existing folder `into` with config, generation config, tokenizer and weights.

    Raises `ModelLoadError` when the file is no GGUF file, is cut short or is of another
    architecture.
    """
    try:
        reader = GGUFReader(gguf_file)
    except (ValueError, IndexError) as error:
        raise ModelLoadError(f"{gguf_file.name} cannot be read as GGUF: {error}.") from error
    metadata = GgufMetadata(reader, gguf_file)
    architecture = metadata.text("general.architecture")
    if architecture != "llama":
        raise ModelLoadError(f"GGUF architecture {architecture!r} is not supported; 'llama' is.")
    is_tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    _write_json(into / "config.json", _model_config(metadata, is_tied))
    _write_json(into / "generation_config.json", _special_token_ids(metadata))
    write_tokenizer(metadata, metadata.integer("llama.context_length"), into)
    num_heads = metadata.integer("llama.attention.head_count")
    num_kv_heads = metadata.integer("llama.attention.head_count_kv")
    write_weights(reader, num_heads, num_kv_heads, into, progress)


def _model_config(metadata: GgufMetadata, is_tied: bool) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": metadata.integer("llama.embedding_length"),
        "intermediate_size": metadata.integer("llama.feed_forward_length"),
        "num_hidden_layers": metadata.integer("llama.block_count"),
        "num_attention_heads": metadata.integer("llama.attention.head_count"),
        "num_key_value_heads": metadata.integer("llama.attention.head_count_kv"),
        "head_dim": metadata.integer("llama.rope.dimension_count"),
        "max_position_embeddings": metadata.integer("llama.context_length"),
        "vocab_size": metadata.integer("llama.vocab_size"),
        "rms_norm_eps": metadata.number("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.number("llama.rope.freq_base"),
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": is_tied,
        "dtype": "bfloat16",
        **_special_token_ids(metadata),
    }


def _special_token_ids(metadata: GgufMetadata) -> dict[str, object]:
    return {
        "bos_token_id": metadata.integer("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.integer("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.integer("tokenizer.ggml.padding_token_id"),
    }


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
