"""The Llama family (Llama, Mistral, Qwen2, Qwen3) on paged KV memory, one rank's shard of it.

Shape suffixes as in `pageray.kernels.ops`; L is the number of layers.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from pageray.cluster.head_partition import RankShard
from pageray.kernels.ops import Ops, RaggedBatch, RopeStep
from pageray.workers.models.decoder_layer import DecoderLayer, load_layer
from pageray.workers.models.rope import cos_sin_table
from pageray.workers.models.spec import ModelSpec
from pageray.workers.models.vocab_parallel import (
    VocabParallelEmbedding,
    VocabParallelHead,
    load_vocabulary,
)
from pageray.workers.models.weights import Checkpoint
from pageray.workers.tensor_parallel import TensorParallelGroup


class LlamaModel:
    """A rank's shard of a model. Stateless between steps: what it remembers is in the pool."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        embedding: VocabParallelEmbedding,
        layers: tuple[DecoderLayer, ...],
        final_norm_E: Tensor,
        head: VocabParallelHead,
        cos_sin_LD: Tensor,
        tp: TensorParallelGroup,
        ops: Ops,
        on_layer_written: Callable[[int], None],
    ) -> None:
        self.spec = spec
        self._embedding = embedding
        self._layers = layers
        self._final_norm_E = final_norm_E
        self._head = head
        self._cos_sin_LD = cos_sin_LD
        self._tp = tp
        self._ops = ops
        self._on_layer_written = on_layer_written

    @torch.inference_mode()
    def forward(  # noqa: PLR0917  # one step's six tensors, in the order they are used
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        pool: Tensor,
        slot_mapping_T: Tensor,
        batch: RaggedBatch,
        logit_rows_R: Tensor,
    ) -> Tensor | None:
        """Compute one step: write the KV of T tokens and return the logits of R of them.

        token_ids_T, positions_T, slot_mapping_T: int64 [T], T >= 1. pool: [B, L, 2, K, P, D],
        written in place. logit_rows_R: int64 [R], the rows of T whose next token is asked for;
        may be empty. Returns float32 [R, vocab_size] on rank 0 and None on the other ranks. All
        ranks must be called with the same step.
        """
        # A captured graph has refilled the batch's tensors since its last step.
        batch.memo.clear()
        all_reduce = self._tp.all_reduce
        kv_layers = pool.unbind(1)
        rope = RopeStep(
            positions_T=positions_T, cos_sin_LD=self._cos_sin_LD, slot_mapping_T=slot_mapping_T
        )
        residual_TE = self._embedding(token_ids_T)
        x_TE = None
        for index, layer in enumerate(self._layers):
            x_TE = layer.attention(x_TE, residual_TE, kv_layers[index], rope, batch)
            self._on_layer_written(index + 1)
            if layer is self._layers[-1]:
                # All KV is written: from here on only the rows whose logits are asked for matter.
                if logit_rows_R.shape[0] == 0:
                    return self._no_logits(pool.device)
                x_TE = x_TE.index_select(0, logit_rows_R)
                residual_TE = residual_TE.index_select(0, logit_rows_R)
            all_reduce(x_TE)
            x_TE = layer.mlp(x_TE, residual_TE)
            all_reduce(x_TE)
        assert x_TE is not None, "a model has layers"
        return self._head(
            self._ops.add_rms_norm(x_TE, residual_TE, self._final_norm_E, self.spec.rms_norm_eps)
        )

    def _no_logits(self, device: torch.device) -> Tensor | None:
        if self._tp.rank != 0:
            return None
        return torch.empty((0, self.spec.vocab_size), dtype=torch.float32, device=device)


@torch.inference_mode()
def load_model(
    folder: Path,
    spec: ModelSpec,
    *,
    shard: RankShard,
    tp: TensorParallelGroup,
    ops: Ops,
    dtype: torch.dtype,
    device: torch.device,
    on_layer_written: Callable[[int], None] = lambda num_layers: None,
) -> LlamaModel:
    """Read rank `tp.rank`'s weights from `folder`, cast to `dtype`, onto `device`.

    `shard` is that rank's entry of `partition_heads(spec.num_heads, spec.num_kv_heads, tp.size)`.
    `on_layer_written` is called in each step with the number of layers whose KV is in the pool.
    Raises `ModelLoadError` for weights that are missing, damaged or not of the spec's shapes.
    """
    with Checkpoint(folder, dtype, device) as checkpoint:
        embedding, head = load_vocabulary(checkpoint, spec, tp, ops)
        layers = tuple(
            load_layer(checkpoint, spec, index, shard=shard, tp=tp, ops=ops)
            for index in range(spec.num_layers)
        )
        final_norm_E = checkpoint.read("model.norm.weight", (spec.hidden_size,))
    cos_sin_LD = cos_sin_table(spec.rope, spec.rotary_dim, spec.max_position).to(device)
    return LlamaModel(
        spec,
        embedding=embedding,
        layers=layers,
        final_norm_E=final_norm_E,
        head=head,
        cos_sin_LD=cos_sin_LD,
        tp=tp,
        ops=ops,
        on_layer_written=on_layer_written,
    )
