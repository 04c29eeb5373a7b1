"""Turns the weights of a llama-architecture GGUF file into Hugging Face safetensors."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from tqdm import tqdm

from pageray.cluster.errors import ModelLoadError

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def write_weights(
    reader: GGUFReader, num_heads: int, num_kv_heads: int, into: Path, progress: bool
) -> None:
    """Dequantise every tensor and write `into/model.safetensors` in bfloat16.

    Raises `ModelLoadError` for a tensor whose name is not one of the llama architecture.
    """
    tensors: dict[str, torch.Tensor] = {}
    for tensor in tqdm(reader.tensors, desc="converting weights", disable=not progress):
        weight: npt.NDArray[np.float32] = dequantize(tensor.data, tensor.tensor_type)
        if tensor.name.endswith("attn_q.weight"):
            weight = undo_rope_permutation(weight, num_heads)
        elif tensor.name.endswith("attn_k.weight"):
            weight = undo_rope_permutation(weight, num_kv_heads)
        tensors[hugging_face_name(tensor.name)] = torch.tensor(weight, dtype=torch.bfloat16)
    file = into / "model.safetensors"
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    # The library makes files that only their owner may read; a cache may be shared.
    file.chmod(0o644)


def hugging_face_name(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`, and so on."""
    if gguf_name in _TOP_NAMES:
        return _TOP_NAMES[gguf_name]
    block, _, rest = gguf_name.partition(".")
    layer, _, kind = rest.partition(".")
    if block != "blk" or not layer.isdigit() or kind not in _LAYER_NAMES:
        raise ModelLoadError(f"The GGUF file holds a tensor of unknown name {gguf_name!r}.")
    return f"model.layers.{layer}.{_LAYER_NAMES[kind]}"


def undo_rope_permutation(
    weight_OE: npt.NDArray[np.float32], num_heads: int
) -> npt.NDArray[np.float32]:
    """Reorder the rows of a q or k projection from llama.cpp's RoPE pairs to Hugging Face's.

    llama.cpp rotates neighbouring rows (2i, 2i + 1) of a head, Hugging Face rows (i, i + D/2).
    weight_OE: [num_heads * D, E] with even D; a new array of the same shape is returned.
    """
    rows, columns = weight_OE.shape
    pairs = weight_OE.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)
