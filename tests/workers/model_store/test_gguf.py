"""The pieces of the GGUF conversion: names, row order, tokenizer, and what is refused."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from gguf import GGUFWriter
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from gguf_wheel import CHAT_TEMPLATE, make_tiny_wheel, tiny_tokens
from pageray.cluster.errors import ModelLoadError
from pageray.workers.model_store.gguf_model import convert_gguf
from pageray.workers.model_store.gguf_weights import hugging_face_name, undo_rope_permutation
from pageray.workers.models.spec import ModelSpec


@pytest.fixture
def tiny_folder(tmp_path: Path) -> Path:
    make_tiny_wheel(tmp_path)
    into = tmp_path / "converted"
    into.mkdir()
    convert_gguf(tmp_path / "tiny.gguf", into, progress=False)
    return into


def test_names() -> None:
    assert hugging_face_name("output_norm.weight") == "model.norm.weight"
    assert hugging_face_name("blk.12.attn_q.weight") == "model.layers.12.self_attn.q_proj.weight"


@pytest.mark.parametrize("name", ["rope_freqs.weight", "blk.0.attn_q.bias", "blk.x.attn_q.weight"])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(ModelLoadError, match=name):
        hugging_face_name(name)


def test_rows_of_a_head_go_back_to_halves() -> None:
    # Two heads of 4 rows. llama.cpp has the pairs (0, 2), (1, 3) of a head side by side.
    stored = np.array([[0], [2], [1], [3], [10], [12], [11], [13]], dtype=np.float32)
    assert undo_rope_permutation(stored, 2)[:, 0].tolist() == [0, 1, 2, 3, 10, 11, 12, 13]


def test_model_spec_of_the_conversion(tiny_folder: Path) -> None:
    spec = ModelSpec.from_folder(tiny_folder)
    assert (spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (64, 4, 2, 16)
    assert (spec.rope.theta, spec.rms_norm_eps, spec.max_position) == (5000.0, 1e-5, 128)
    assert (spec.bos_token_id, spec.eos_token_ids, spec.tie_word_embeddings) == (1, (2,), True)


def test_tokenizer_merges_splits_digits_and_keeps_special_tokens(tiny_folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_folder / "tokenizer.json"))
    encoded = tokenizer.encode("abc 42<|end|>é")
    assert encoded.tokens == ["abc", "Ġ", "4", "2", "<|end|>", "Ã", "©"]
    assert [tiny_tokens()[token_id] for token_id in encoded.ids] == encoded.tokens
    assert tokenizer.decode(encoded.ids, skip_special_tokens=True) == "abc 42é"


def test_tokenizer_settings_reach_transformers(tiny_folder: Path) -> None:
    tokenizer = cast("Any", AutoTokenizer.from_pretrained(tiny_folder))
    assert tokenizer.chat_template == CHAT_TEMPLATE
    special = (tokenizer.unk_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert (*special, tokenizer.pad_token_id) == (0, 1, 2, 2)


def test_smollm2_round_trip(smollm2_folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2_folder / "tokenizer.json"))
    text = "Naïve café 2024:\n\tdef f(x): return x  # 日本 🙂"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    # Ids as the published SmolLM2 tokenizer gives them.
    assert tokenizer.encode("Hello world").ids == [19556, 905]
    assert len(tokenizer.encode("2024").ids) == 4


@pytest.mark.parametrize(
    ("architecture", "tokenizer", "message"),
    [("phi3", "gpt2", "phi3"), ("llama", None, r"tokenizer\.ggml")],
)
def test_foreign_files_are_refused(
    architecture: str, tokenizer: str | None, message: str, tmp_path: Path
) -> None:
    make_tiny_wheel(tmp_path)
    path = tmp_path / "foreign.gguf"
    writer = GGUFWriter(str(path), architecture)
    if tokenizer is not None:
        writer.add_tokenizer_model(tokenizer)
    writer.add_tensor("token_embd.weight", np.zeros((2, 32), dtype=np.float32))
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
    ):
        write()
    writer.close()
    with pytest.raises(ModelLoadError, match=message if tokenizer else "no field"):
        convert_gguf(path, tmp_path, progress=False)
