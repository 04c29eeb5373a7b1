"""Runs a `LlamaModel` over whole prompts on a paged pool, in chunks, several prompts at once."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from pageray.cluster.head_partition import RankShard, partition_heads
from pageray.kernels.dispatch import ops_for
from pageray.kernels.ops import RaggedBatch
from pageray.workers.models.llama import LlamaModel, load_model
from pageray.workers.models.spec import ModelSpec
from pageray.workers.tensor_parallel import SingleRank, TensorParallelGroup

CPU = torch.device("cpu")


def load_shard(
    folder: Path, tp: TensorParallelGroup | None = None, dtype: torch.dtype = torch.float32
) -> tuple[LlamaModel, RankShard]:
    """The rank's shard of a model on the reference operations."""
    group = tp or SingleRank()
    spec = ModelSpec.from_folder(folder)
    shard = partition_heads(spec.num_heads, spec.num_kv_heads, group.size)[group.rank]
    model = load_model(
        folder, spec, shard=shard, tp=group, ops=ops_for("reference"), dtype=dtype, device=CPU
    )
    return model, shard


def paged_logits(
    model: LlamaModel,
    shard: RankShard,
    prompts: Sequence[Sequence[int]],
    *,
    block_size: int = 4,
    chunk_tokens: int = 5,
    kv_dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """float32 [length, vocab_size] for each prompt, from steps of up to `chunk_tokens` per prompt.

    The pool starts as NaN and blocks are dealt out in a shuffled order, so reading a wrong slot
    shows. Ranks other than 0 get empty tensors.
    """
    pages = Pages(model.spec, shard, prompts, block_size, kv_dtype)
    collected: list[list[Tensor]] = [[] for _ in prompts]
    for start in range(0, max(map(len, prompts)), chunk_tokens):
        chunks = [
            (index, start, min(start + chunk_tokens, len(prompt)))
            for index, prompt in enumerate(prompts)
            if len(prompt) > start
        ]
        logits = pages.step(model, prompts, chunks)
        if logits is None:
            continue
        sizes = [end - begin for _, begin, end in chunks]
        for (index, _, _), part in zip(chunks, torch.split(logits, sizes), strict=True):
            collected[index].append(part)
    return [torch.cat(parts) if parts else torch.empty(0) for parts in collected]


class Pages:
    """A pool with a block table for each prompt."""

    def __init__(
        self,
        spec: ModelSpec,
        shard: RankShard,
        prompts: Sequence[Sequence[int]],
        block_size: int,
        kv_dtype: torch.dtype = torch.float32,
    ) -> None:
        self._block_size = block_size
        width = max(-(-len(prompt) // block_size) for prompt in prompts)
        num_blocks = 1 + width * len(prompts)
        shuffled = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(1)) + 1
        self._tables = shuffled.view(len(prompts), width)
        record = (spec.num_layers, 2, shard.num_kv_heads, block_size, spec.head_dim)
        self._pool = torch.full((num_blocks, *record), torch.nan).to(kv_dtype)

    def step(
        self,
        model: LlamaModel,
        prompts: Sequence[Sequence[int]],
        chunks: Sequence[tuple[int, int, int]],
        logit_rows: Sequence[int] | None = None,
    ) -> Tensor | None:
        """Compute (prompt, start, end) chunks. Logits of the rows named, by default all their
        tokens; None off rank 0."""
        tokens = [token for i, start, end in chunks for token in prompts[i][start:end]]
        positions = [position for _, start, end in chunks for position in range(start, end)]
        query_starts = [0, *_running_sum(end - start for _, start, end in chunks)]
        kv_lens = [end for _, _, end in chunks]
        batch = RaggedBatch(
            query_starts_S1=torch.tensor(query_starts, dtype=torch.int32),
            kv_lens_S=torch.tensor(kv_lens, dtype=torch.int32),
            block_tables_SN=self._tables[[i for i, _, _ in chunks]].int(),
            max_query_len=max(end - start for _, start, end in chunks),
            max_kv_len=max(kv_lens),
        )
        return model.forward(
            torch.tensor(tokens),
            torch.tensor(positions),
            self._pool,
            torch.tensor([self._slot(i, p) for i, s, e in chunks for p in range(s, e)]),
            batch,
            torch.tensor(range(len(tokens)) if logit_rows is None else logit_rows).long(),
        )

    def _slot(self, prompt: int, position: int) -> int:
        block = int(self._tables[prompt, position // self._block_size])
        return block * self._block_size + position % self._block_size


def _running_sum(lengths: Iterator[int]) -> Iterator[int]:
    total = 0
    for length in lengths:
        total += length
        yield total
