"""Turns the byte-level BPE tokenizer inside a GGUF file into Hugging Face tokenizer files."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence

from pageray.cluster.errors import ModelLoadError
from pageray.workers.model_store.gguf_reading import GgufMetadata

_CONTROL_TOKEN = 3
"""`tokenizer.ggml.token_type` of a token that no text encodes to: a special token."""


def write_tokenizer(metadata: GgufMetadata, max_position: int, into: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` (with the chat template) into `into`.

    Raises `ModelLoadError` for a tokenizer that is not byte-level BPE or whose pre-tokenizer is
    not known here.
    """
    tokens = metadata.texts("tokenizer.ggml.tokens")
    tokenizer = _build_tokenizer(metadata, tokens)
    tokenizer.save(str(into / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[metadata.integer("tokenizer.ggml.bos_token_id")],
        "eos_token": tokens[metadata.integer("tokenizer.ggml.eos_token_id")],
        "pad_token": tokens[metadata.integer("tokenizer.ggml.padding_token_id")],
        "unk_token": tokens[metadata.integer("tokenizer.ggml.unknown_token_id")],
        "chat_template": metadata.text("tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_position,
    }
    (into / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False))


def _build_tokenizer(metadata: GgufMetadata, tokens: list[str]) -> Tokenizer:
    model = metadata.text("tokenizer.ggml.model")
    if model != "gpt2":
        raise ModelLoadError(f"The GGUF tokenizer is {model!r}; only byte-level BPE ('gpt2') is.")
    merges = [_split_merge(merge) for merge in metadata.texts("tokenizer.ggml.merges")]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(metadata.text("tokenizer.ggml.pre"))
    tokenizer.decoder = ByteLevelDecoder()
    kinds = metadata.integers("tokenizer.ggml.token_type")
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == _CONTROL_TOKEN
        ]
    )
    return tokenizer


def _split_merge(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _pre_tokenizer(name: str) -> PreTokenizer:
    """The split before BPE that llama.cpp calls `name`."""
    if name != "smollm":
        raise ModelLoadError(f"The GGUF pre-tokenizer {name!r} is not known; 'smollm' is.")
    return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
