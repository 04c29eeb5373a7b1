"""A step plan as the tensors that the model takes."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pageray.cluster.memory_plan import blocks_for_tokens
from pageray.cluster.step import StepPlan
from pageray.kernels.ops import RaggedBatch
from pageray.workers.sequence_store import SequenceStore


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """T tokens of S chunks; R logit rows, one for each chunk that is sampled from.

    All tensors are on the host until `to` has moved them.
    """

    token_ids_T: Tensor
    """int64 [T]."""
    positions_T: Tensor
    """int64 [T]."""
    slot_mapping_T: Tensor
    """int64 [T]: the flat token slot of each token, read from its block table."""
    batch: RaggedBatch
    logit_rows_R: Tensor
    """int64 [R]: rows of T whose logits are wanted."""
    sample_rows: tuple[int, ...]
    """For each of the plan's samples, its row of the R logits."""

    def to(self, device: torch.device) -> "StepInputs":
        """The same step on `device`."""
        batch = self.batch
        return StepInputs(
            token_ids_T=self.token_ids_T.to(device),
            positions_T=self.positions_T.to(device),
            slot_mapping_T=self.slot_mapping_T.to(device),
            batch=RaggedBatch(
                query_starts_S1=batch.query_starts_S1.to(device),
                kv_lens_S=batch.kv_lens_S.to(device),
                block_tables_SN=batch.block_tables_SN.to(device),
                max_query_len=batch.max_query_len,
                max_kv_len=batch.max_kv_len,
            ),
            logit_rows_R=self.logit_rows_R.to(device),
            sample_rows=self.sample_rows,
        )


def build_step_inputs(plan: StepPlan, store: SequenceStore, block_size: int) -> StepInputs:
    """Index the store's arrays by the plan's chunks. `store` has applied the plan already."""
    chunks = plan.chunks
    rows_S = np.array([store[chunk.sequence_id].row for chunk in chunks], np.int64)
    starts_S = np.array([chunk.start for chunk in chunks], np.int64)
    lengths_S = np.array([chunk.num_tokens for chunk in chunks], np.int64)
    query_starts_S1 = np.zeros(len(chunks) + 1, np.int64)
    np.cumsum(lengths_S, out=query_starts_S1[1:])

    rows_T = np.repeat(rows_S, lengths_S)
    positions_T: NDArray[np.int64] = np.arange(int(query_starts_S1[-1])) + np.repeat(
        starts_S - query_starts_S1[:-1], lengths_S
    )
    token_ids_T = store.token_ids[rows_T, positions_T]
    blocks_T = store.block_tables[rows_T, positions_T // block_size].astype(np.int64)
    slot_mapping_T: NDArray[np.int64] = blocks_T * block_size + positions_T % block_size

    kv_lens_S = starts_S + lengths_S
    max_kv_len = int(kv_lens_S.max())
    width = blocks_for_tokens(max_kv_len, block_size)
    block_tables_SN = store.block_tables[rows_S, :width]

    sampled_chunks = sorted({sample.chunk for sample in plan.samples})
    row_of_chunk = {chunk: row for row, chunk in enumerate(sampled_chunks)}
    logit_rows_R = query_starts_S1[1:][np.array(sampled_chunks, np.int64)] - 1
    return StepInputs(
        token_ids_T=torch.from_numpy(token_ids_T),
        positions_T=torch.from_numpy(positions_T),
        slot_mapping_T=torch.from_numpy(slot_mapping_T),
        batch=RaggedBatch(
            query_starts_S1=torch.from_numpy(query_starts_S1.astype(np.int32)),
            kv_lens_S=torch.from_numpy(kv_lens_S.astype(np.int32)),
            block_tables_SN=torch.from_numpy(block_tables_SN),
            max_query_len=int(lengths_S.max()),
            max_kv_len=max_kv_len,
        ),
        logit_rows_R=torch.from_numpy(logit_rows_R),
        sample_rows=tuple(row_of_chunk[sample.chunk] for sample in plan.samples),
    )
