"""The Llama family (Llama, Mistral, Qwen2, Qwen3) on paged KV memory, one rank's shard of it.

Shape suffixes as in `pageray.kernels.ops`; L is the number of layers.
"""

from pathlib import Path

import torch
from torch import Tensor

from pageray.cluster.head_partition import RankShard
from pageray.kernels.ops import (
    LayerProgress,
    LayerStack,
    MlpBlock,
    NoProgress,
    Ops,
    RaggedBatch,
    RopeStep,
)
from pageray.workers.models.decoder_layer import DecoderLayer, load_layer
from pageray.workers.models.layer_loop import LayerLoop
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
        layers: LayerStack,
        last_mlp: MlpBlock,
        final_norm_E: Tensor,
        head: VocabParallelHead,
        cos_sin_LD: Tensor,
        tp: TensorParallelGroup,
        ops: Ops,
        progress: LayerProgress,
    ) -> None:
        """`layers`: all of them but the MLP of the last one, which is `last_mlp`."""
        self.spec = spec
        self._embedding = embedding
        self._layers = layers
        self._last_mlp = last_mlp
        self._final_norm_E = final_norm_E
        self._head = head
        self._cos_sin_LD = cos_sin_LD
        self._tp = tp
        self._ops = ops
        self._progress = progress

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
        rope = RopeStep(
            positions_T=positions_T, cos_sin_LD=self._cos_sin_LD, slot_mapping_T=slot_mapping_T
        )
        residual_TE = self._embedding(token_ids_T)
        x_TE = self._layers(residual_TE, pool, rope, batch, self._progress)
        # All KV is written: from here on only the rows whose logits are asked for matter.
        if logit_rows_R.shape[0] == 0:
            return self._no_logits(pool.device)
        x_RE = x_TE.index_select(0, logit_rows_R)
        residual_RE = residual_TE.index_select(0, logit_rows_R)
        all_reduce(x_RE)
        x_RE = self._last_mlp(x_RE, residual_RE)
        all_reduce(x_RE)
        return self._head(
            self._ops.add_rms_norm(x_RE, residual_RE, self._final_norm_E, self.spec.rms_norm_eps)
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
    progress: LayerProgress | None = None,
) -> LlamaModel:
    """Read rank `tp.rank`'s weights from `folder`, cast to `dtype`, onto `device`.

    `shard` is that rank's entry of `partition_heads(spec.num_heads, spec.num_kv_heads, tp.size)`.
    `progress` follows each step's layers. Raises `ModelLoadError` for weights that are missing, damaged or not of the spec's shapes.
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
        layers=_joined(layers, tp, ops),
        last_mlp=layers[-1].mlp,
        final_norm_E=final_norm_E,
        head=head,
        cos_sin_LD=cos_sin_LD,
        tp=tp,
        ops=ops,
        progress=progress or NoProgress(),
    )


def _joined(layers: tuple[DecoderLayer, ...], tp: TensorParallelGroup, ops: Ops) -> LayerStack:
    """One operation if `ops` has one and the ranks can sum without a call from Python."""
    sums = tp.compiled_sums()
    stack = None
    if tp.size == 1 or sums is not None:
        stack = ops.stack_layers([(layer.attention, layer.mlp) for layer in layers], sums)
    return stack or LayerLoop(layers, tp.all_reduce)
