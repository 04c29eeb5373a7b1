"""What a rank remembers of the sequences it was told about, as arrays a step can index.

Row r of `token_ids` and `block_tables` belongs to one sequence. Batches are put together by
indexing whole arrays, not by looping over tokens. Rows are reused; what lies past a row's length
is left over from earlier tenants and never read.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pageray.cluster.ids import SequenceId
from pageray.cluster.memory_plan import blocks_for_tokens
from pageray.cluster.sampling_params import SamplingParams
from pageray.cluster.step import NewSequence, StepPlan


@dataclass(slots=True)
class StoredSequence:
    row: int
    num_tokens: int
    num_prompt_tokens: int
    index: int
    seed: int
    sampling: SamplingParams


class SequenceStore:
    """Sequences by id. Grows by doubling, so a long-running rank stops growing."""

    def __init__(self, max_model_len: int, block_size: int) -> None:
        self._width_tokens = max_model_len
        self._width_blocks = blocks_for_tokens(max_model_len, block_size)
        self.token_ids: NDArray[np.int64] = np.zeros((0, self._width_tokens), np.int64)
        self.block_tables: NDArray[np.int32] = np.zeros((0, self._width_blocks), np.int32)
        self._sequences: dict[SequenceId, StoredSequence] = {}
        self._free_rows: list[int] = []

    def __getitem__(self, sequence_id: SequenceId) -> StoredSequence:
        return self._sequences[sequence_id]

    def __len__(self) -> int:
        return len(self._sequences)

    def apply(self, plan: StepPlan) -> None:
        """Drop, add and update as the plan says. KeyError: the plan names an unknown sequence."""
        for sequence_id in plan.dropped:
            self._free_rows.append(self._sequences.pop(sequence_id).row)
        for new in plan.added:
            self._add(new)
        for update in plan.updated:
            stored = self._sequences[update.sequence_id]
            self._append_tokens(stored, update.new_token_ids)
            end = update.table_start + len(update.block_ids)
            self.block_tables[stored.row, update.table_start : end] = update.block_ids

    def _add(self, new: NewSequence) -> None:
        if not self._free_rows:
            self._grow()
        stored = StoredSequence(
            row=self._free_rows.pop(),
            num_tokens=0,
            num_prompt_tokens=new.num_prompt_tokens,
            index=new.index,
            seed=new.seed,
            sampling=new.sampling,
        )
        self._append_tokens(stored, new.token_ids)
        self.block_tables[stored.row, : len(new.block_ids)] = new.block_ids
        self._sequences[new.sequence_id] = stored

    def _append_tokens(self, stored: StoredSequence, token_ids: tuple[int, ...]) -> None:
        end = stored.num_tokens + len(token_ids)
        self.token_ids[stored.row, stored.num_tokens : end] = token_ids
        stored.num_tokens = end

    def _grow(self) -> None:
        old = len(self.token_ids)
        new = max(8, 2 * old)
        # np.zeros takes address space; memory is taken row by row as rows are written.
        tokens = np.zeros((new, self._width_tokens), np.int64)
        tables = np.zeros((new, self._width_blocks), np.int32)
        tokens[:old], tables[:old] = self.token_ids, self.block_tables
        self.token_ids, self.block_tables = tokens, tables
        self._free_rows.extend(range(new - 1, old - 1, -1))
