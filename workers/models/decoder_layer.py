"""One decoder layer's weights as a rank holds them: column-parallel in, row-parallel out.

Megatron-LM's split (Shoeybi et al. 2019, arXiv:1909.08053): q, k, v, gate and up are cut by
output rows, o and down by input columns, so that each half of the layer ends in one all-reduce.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pageray.cluster.head_partition import RankShard, split_range
from pageray.kernels.ops import (
    AttentionBlock,
    AttentionOptions,
    AttentionWeights,
    MlpBlock,
    MlpWeights,
    Ops,
    QkNorm,
)
from pageray.workers.models.spec import ModelSpec
from pageray.workers.models.weights import Checkpoint
from pageray.workers.tensor_parallel import TensorParallelGroup


@dataclass(frozen=True, kw_only=True)
class DecoderLayer:
    """A layer's shard. Each block leaves a summand that all ranks add up."""

    attention: AttentionBlock
    mlp: MlpBlock


@dataclass(frozen=True)
class _LayerLoader:
    """Reads the parts of layer `index` that rank `tp.rank` holds."""

    checkpoint: Checkpoint
    spec: ModelSpec
    index: int
    shard: RankShard
    tp: TensorParallelGroup

    def _name(self, suffix: str) -> str:
        return f"model.layers.{self.index}.{suffix}"

    def vector(self, suffix: str, length: int) -> Tensor:
        return self.checkpoint.read(self._name(suffix), (length,))

    def column_parallel(
        self, module: str, num_rows: int, rows: tuple[int, int], has_bias: bool
    ) -> tuple[Tensor, Tensor | None]:
        """(weight, bias) rows [start, end) of a [num_rows, E] projection."""
        shape = (num_rows, self.spec.hidden_size)
        weight = self.checkpoint.read(self._name(f"{module}.weight"), shape, rows=rows)
        if not has_bias:
            return weight, None
        return weight, self.checkpoint.read(self._name(f"{module}.bias"), (num_rows,), rows=rows)

    def row_parallel(
        self, module: str, num_columns: int, columns: tuple[int, int], has_bias: bool
    ) -> tuple[Tensor, Tensor | None]:
        """(weight columns [start, end), bias) of an [E, num_columns] projection.

        The ranks' outputs are summed, so the bias is added on rank 0 alone.
        """
        shape = (self.spec.hidden_size, num_columns)
        weight = self.checkpoint.read(self._name(f"{module}.weight"), shape, columns=columns)
        if not has_bias or self.tp.rank != 0:
            return weight, None
        return weight, self.vector(f"{module}.bias", self.spec.hidden_size)


def load_layer(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    index: int,
    *,
    shard: RankShard,
    tp: TensorParallelGroup,
    ops: Ops,
) -> DecoderLayer:
    """Read and pack one layer. Raises `ModelLoadError` as `Checkpoint.read` does."""
    loader = _LayerLoader(checkpoint, spec, index, shard, tp)
    return DecoderLayer(
        attention=ops.pack_attention(_load_attention(loader)),
        mlp=ops.pack_mlp(_load_mlp(loader)),
    )


def _load_attention(loader: _LayerLoader) -> AttentionWeights:
    spec = loader.spec
    qkv_OE, qkv_bias_O = _load_qkv(loader)
    o_EO, o_bias_E = _load_o(loader)
    return AttentionWeights(
        norm_E=loader.vector("input_layernorm.weight", spec.hidden_size),
        eps=spec.rms_norm_eps,
        qkv_OE=qkv_OE,
        qkv_bias_O=qkv_bias_O,
        qk_norm=_load_qk_norm(loader) if spec.has_qk_norm else None,
        o_EO=o_EO,
        o_bias_E=o_bias_E,
        head_dim=spec.head_dim,
        options=AttentionOptions(
            scale=spec.head_dim**-0.5, window=spec.layer_windows[loader.index]
        ),
    )


def _load_qk_norm(loader: _LayerLoader) -> QkNorm:
    head_dim = loader.spec.head_dim
    return QkNorm(
        q_norm_D=loader.vector("self_attn.q_norm.weight", head_dim),
        k_norm_D=loader.vector("self_attn.k_norm.weight", head_dim),
        eps=loader.spec.rms_norm_eps,
    )


def _load_qkv(loader: _LayerLoader) -> tuple[Tensor, Tensor | None]:
    spec, shard = loader.spec, loader.shard
    q_rows = (shard.q_start * spec.head_dim, shard.q_end * spec.head_dim)
    kv_rows = (shard.kv_start * spec.head_dim, shard.kv_end * spec.head_dim)
    num_q_rows, num_kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    parts = (
        loader.column_parallel("self_attn.q_proj", num_q_rows, q_rows, spec.qkv_bias),
        loader.column_parallel("self_attn.k_proj", num_kv_rows, kv_rows, spec.qkv_bias),
        loader.column_parallel("self_attn.v_proj", num_kv_rows, kv_rows, spec.qkv_bias),
    )
    return _stacked(parts)


def _load_o(loader: _LayerLoader) -> tuple[Tensor, Tensor | None]:
    spec, shard = loader.spec, loader.shard
    columns = (shard.q_start * spec.head_dim, shard.q_end * spec.head_dim)
    num_columns = spec.num_heads * spec.head_dim
    has_bias = spec.attention_output_bias
    return loader.row_parallel("self_attn.o_proj", num_columns, columns, has_bias)


def _load_mlp(loader: _LayerLoader) -> MlpWeights:
    spec = loader.spec
    part = split_range(spec.intermediate_size, loader.tp.size, loader.tp.rank)
    gate_up_2IE, gate_up_bias_2I = _stacked(
        (
            loader.column_parallel("mlp.gate_proj", spec.intermediate_size, part, spec.mlp_bias),
            loader.column_parallel("mlp.up_proj", spec.intermediate_size, part, spec.mlp_bias),
        )
    )
    down_EI, down_bias_E = loader.row_parallel(
        "mlp.down_proj", spec.intermediate_size, part, spec.mlp_bias
    )
    return MlpWeights(
        norm_E=loader.vector("post_attention_layernorm.weight", spec.hidden_size),
        eps=spec.rms_norm_eps,
        gate_up_2IE=gate_up_2IE,
        gate_up_bias_2I=gate_up_bias_2I,
        down_EI=down_EI,
        down_bias_E=down_bias_E,
    )


def _stacked(parts: tuple[tuple[Tensor, Tensor | None], ...]) -> tuple[Tensor, Tensor | None]:
    """The weight and bias of one projection that gives the parts' outputs side by side: one large
    matrix product."""
    weight = torch.cat([weight for weight, _ in parts])
    biases = [bias for _, bias in parts if bias is not None]
    return weight, torch.cat(biases) if biases else None
