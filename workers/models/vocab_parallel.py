"""Embedding and LM head, cut along the vocabulary.

Rank r of n holds rows r * W .. (r + 1) * W - 1 of each matrix, W = ceil(vocab_size / n) on every
rank, so that the gather moves equal parts. Rows past the vocabulary are zero and their logits are
cut off after the gather.
"""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from pageray.kernels.ops import Linear, Ops
from pageray.workers.models.spec import ModelSpec
from pageray.workers.models.weights import Checkpoint
from pageray.workers.tensor_parallel import TensorParallelGroup

EMBEDDING_NAME = "model.embed_tokens.weight"
LM_HEAD_NAME = "lm_head.weight"


@dataclass(frozen=True)
class VocabParallelEmbedding:
    """Token ids to hidden states; each rank looks up its own rows and the sum has them all."""

    weight_WE: Tensor
    tp: TensorParallelGroup

    def __call__(self, token_ids_T: Tensor) -> Tensor:
        """int64 [T], each in 0 .. vocab_size - 1 -> [T, E] in the weight's dtype."""
        if self.tp.size == 1:
            return functional.embedding(token_ids_T, self.weight_WE)
        width = self.weight_WE.shape[0]
        rows_T = token_ids_T - self.tp.rank * width
        is_elsewhere_T = (rows_T < 0) | (rows_T >= width)
        x_TE = functional.embedding(rows_T.masked_fill_(is_elsewhere_T, 0), self.weight_WE)
        x_TE.masked_fill_(is_elsewhere_T.unsqueeze(1), 0)
        self.tp.all_reduce(x_TE)
        return x_TE


@dataclass(frozen=True)
class VocabParallelHead:
    """Hidden states to logits, gathered to rank 0."""

    linear: Linear
    vocab_size: int
    tp: TensorParallelGroup

    def __call__(self, x_RE: Tensor) -> Tensor | None:
        """[R, E] -> float32 [R, vocab_size] on rank 0, None on the others."""
        logits_RV = self.tp.gather_columns(self.linear(x_RE), self.vocab_size)
        return None if logits_RV is None else logits_RV.float()


def load_vocabulary(
    checkpoint: Checkpoint, spec: ModelSpec, tp: TensorParallelGroup, ops: Ops
) -> tuple[VocabParallelEmbedding, VocabParallelHead]:
    """Both ends of the model; with tied embeddings they share one matrix."""
    embedding_WE = _load_rows(checkpoint, EMBEDDING_NAME, spec, tp)
    if spec.tie_word_embeddings:
        head_WE = embedding_WE
    else:
        head_WE = _load_rows(checkpoint, LM_HEAD_NAME, spec, tp)
    head = VocabParallelHead(ops.pack_linear(head_WE, None), spec.vocab_size, tp)
    return VocabParallelEmbedding(embedding_WE, tp), head


def _load_rows(
    checkpoint: Checkpoint, name: str, spec: ModelSpec, tp: TensorParallelGroup
) -> Tensor:
    width = -(-spec.vocab_size // tp.size)
    start = min(tp.rank * width, spec.vocab_size)
    end = min(start + width, spec.vocab_size)
    shape = (spec.vocab_size, spec.hidden_size)
    weight = checkpoint.read(name, shape, rows=(start, end))
    padding = width - (end - start)
    return functional.pad(weight, (0, 0, 0, padding)) if padding else weight
