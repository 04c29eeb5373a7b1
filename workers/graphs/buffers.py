"""The tensors that captured graphs read: filled anew for every step, never moved.

Shape suffixes as in `pageray.kernels.ops`; M is the largest number of sequences.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pageray.cluster.ids import NULL_BLOCK
from pageray.kernels.ops import RaggedBatch
from pageray.workers.step_inputs import StepInputs

_NO_SLOT = -1
_PADDING_KV_LEN = 1
"""The shortest there is: a padding row attends to one token of the null block."""


@dataclass(frozen=True)
class DecodeBuffers:
    """One query for each of M rows. Rows without a sequence are padding: they write nothing
    (slot -1), read the first token slot of the null block, and their logits mean nothing."""

    token_ids_M: Tensor
    positions_M: Tensor
    slot_mapping_M: Tensor
    """int64, as the two above."""
    kv_lens_M: Tensor
    block_tables_MN: Tensor
    query_starts_M1: Tensor
    """0 .. M; int32, as the two above."""
    rows_M: Tensor
    """int64 0 .. M - 1: every row's logits are computed."""

    @classmethod
    def allocate(cls, num_rows: int, table_width: int, device: torch.device) -> "DecodeBuffers":
        """`num_rows` rows of padding, with tables of `table_width` >= 1 blocks."""
        int64 = torch.zeros((3, num_rows), dtype=torch.int64, device=device)
        int64[2] = _NO_SLOT
        rows_M1 = torch.arange(num_rows + 1, device=device)
        return cls(
            token_ids_M=int64[0],
            positions_M=int64[1],
            slot_mapping_M=int64[2],
            kv_lens_M=torch.full_like(rows_M1[1:], _PADDING_KV_LEN, dtype=torch.int32),
            block_tables_MN=torch.full(
                (num_rows, table_width), NULL_BLOCK, dtype=torch.int32, device=device
            ),
            query_starts_M1=rows_M1.int(),
            rows_M=rows_M1[:-1],
        )

    def first(self, num_rows: int) -> "DecodeBuffers":
        """The same memory, of the first rows only."""
        return DecodeBuffers(
            token_ids_M=self.token_ids_M[:num_rows],
            positions_M=self.positions_M[:num_rows],
            slot_mapping_M=self.slot_mapping_M[:num_rows],
            kv_lens_M=self.kv_lens_M[:num_rows],
            block_tables_MN=self.block_tables_MN[:num_rows],
            query_starts_M1=self.query_starts_M1[: num_rows + 1],
            rows_M=self.rows_M[:num_rows],
        )

    def batch(self, max_kv_len: int) -> RaggedBatch:
        """All rows, none longer than `max_kv_len` tokens."""
        return RaggedBatch(
            query_starts_S1=self.query_starts_M1,
            kv_lens_S=self.kv_lens_M,
            block_tables_SN=self.block_tables_MN,
            max_query_len=1,
            max_kv_len=max_kv_len,
        )

    def fill(self, inputs: StepInputs) -> None:
        """Take over a step of at most M sequences with one query each; pad the rows after it."""
        batch = inputs.batch
        num_rows, width = batch.block_tables_SN.shape
        self.token_ids_M[:num_rows].copy_(inputs.token_ids_T)
        self.positions_M[:num_rows].copy_(inputs.positions_T)
        self.slot_mapping_M[:num_rows].copy_(inputs.slot_mapping_T)
        self.kv_lens_M[:num_rows].copy_(batch.kv_lens_S)
        # What stands right of a sequence's blocks is never read, so it may be left over.
        self.block_tables_MN[:num_rows, :width].copy_(batch.block_tables_SN)
        # Token id and position of padding are left over too: any valid pair will do.
        self.slot_mapping_M[num_rows:] = _NO_SLOT
        self.kv_lens_M[num_rows:] = _PADDING_KV_LEN
        self.block_tables_MN[num_rows:, 0] = NULL_BLOCK
