"""Ranks that compute nothing but remember everything: the scheduler's twin for tests.

A token slot holds the digest of the whole prefix up to its token, where a real rank would hold K
and V. Before a chunk is "computed", every earlier slot of the sequence is read through its block
table and compared with what must be there, so a block that was reused, shared or copied wrongly
fails the step at once. The next token is a function of the prefix and of the sampler's counter.
"""

from dataclasses import dataclass

from pageray.cluster.ids import BlockId, SequenceId
from pageray.cluster.step import NewSequence, StepPlan, StepResult

VOCAB_SIZE = 101
EOS = 100


@dataclass
class _Known:
    introduction: NewSequence
    token_ids: list[int]
    table: list[BlockId]


def prefix_digests(token_ids: list[int]) -> list[int]:
    """digest[i] stands for the KV of token i: it depends on tokens 0..i."""
    digests: list[int] = []
    state = 7
    for token_id in token_ids:
        state = (state * 1_000_003 + token_id + 1) % (2**61 - 1)
        digests.append(state)
    return digests


def next_token(digest: int, seed: int, index: int, position: int) -> int:
    return (digest ^ (seed * 31 + index * 17 + position)) % VOCAB_SIZE


def continue_alone(token_ids: list[int], seed: int, index: int, num_tokens: int) -> list[int]:
    """What a sequence produces with nobody else around: `num_tokens` tokens, or up to EOS."""
    tokens = list(token_ids)
    for _ in range(num_tokens):
        token = next_token(prefix_digests(tokens)[-1], seed, index, len(tokens))
        tokens.append(token)
        if token == EOS:
            break
    return tokens[len(token_ids) :]


class FakeRanks:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.slots: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks + 1)]
        self.known: dict[SequenceId, _Known] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        for sequence_id in plan.dropped:
            del self.known[sequence_id]
        for new in plan.added:
            assert new.sequence_id not in self.known
            self.known[new.sequence_id] = _Known(new, list(new.token_ids), list(new.block_ids))
        for update in plan.updated:
            known = self.known[update.sequence_id]
            known.token_ids += update.new_token_ids
            assert update.table_start <= len(known.table)
            known.table[update.table_start :] = update.block_ids
        sources = {source for source, _ in plan.copies}
        destinations = [destination for _, destination in plan.copies]
        assert len(set(destinations)) == len(destinations)
        assert not sources & set(destinations)
        for source, destination in plan.copies:
            self.slots[destination] = list(self.slots[source])
        self._write(plan)
        tokens = [
            self._sample(sample.sequence_id, plan.chunks[sample.chunk].sequence_id)
            for sample in plan.samples
        ]
        return StepResult(step_id=plan.step_id, token_ids=tuple(tokens))

    def _write(self, plan: StepPlan) -> None:
        written: dict[tuple[int, int], SequenceId] = {}
        for chunk in plan.chunks:
            known = self.known[chunk.sequence_id]
            digests = prefix_digests(known.token_ids)
            assert chunk.num_tokens >= 1
            assert chunk.start + chunk.num_tokens <= len(known.token_ids)
            for position in range(chunk.start, chunk.start + chunk.num_tokens):
                slot = self._slot(known, position)
                assert slot not in written, f"{slot} is written by two sequences in one step"
                written[slot] = chunk.sequence_id
                self.slots[slot[0]][slot[1]] = digests[position]
        for chunk in plan.chunks:
            known = self.known[chunk.sequence_id]
            digests = prefix_digests(known.token_ids)
            for position in range(chunk.start + chunk.num_tokens):
                block, slot = self._slot(known, position)
                assert self.slots[block][slot] == digests[position], (
                    f"step {plan.step_id}: sequence {chunk.sequence_id} reads foreign KV at "
                    f"position {position} (block {block}, slot {slot})"
                )

    def _slot(self, known: _Known, position: int) -> tuple[int, int]:
        return known.table[position // self.block_size], position % self.block_size

    def _sample(self, sequence_id: SequenceId, computed_by: SequenceId) -> int:
        known = self.known[sequence_id]
        digest = prefix_digests(self.known[computed_by].token_ids)[len(known.token_ids) - 1]
        new = known.introduction
        return next_token(digest, new.seed, new.index, len(known.token_ids))
