"""One engine step as data: `StepPlan` goes to every rank, `StepResult` comes back from rank 0.

Both are plain frozen values that encode to MessagePack: they cross a process boundary every
step. New sequences are sent in full once and differences after; ranks keep what they were told.
"""

import msgspec

from pageray.cluster.generation import TokenLogprobs
from pageray.cluster.ids import BlockId, SequenceId
from pageray.cluster.sampling_params import SamplingParams


class NewSequence(msgspec.Struct, frozen=True, array_like=True):
    """Everything a rank needs to know of a sequence it has not seen (or has been told to drop).

    `token_ids`: prompt and output so far. `num_prompt_tokens`: how many of them are the prompt.
    `seed` is always set: the engine draws one for a request that came without.
    """

    sequence_id: SequenceId
    index: int
    """Which of its request's n sequences this is: part of the sampler's counter."""
    seed: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    block_ids: tuple[BlockId, ...]
    sampling: SamplingParams


class SequenceUpdate(msgspec.Struct, frozen=True, array_like=True):
    """What changed about a sequence the ranks already know.

    The block table from entry `table_start` on is replaced by `block_ids` (a fork's copied tail
    or, with `table_start` at the end, newly allocated blocks).
    """

    sequence_id: SequenceId
    new_token_ids: tuple[int, ...]
    table_start: int
    block_ids: tuple[BlockId, ...]


class ScheduledChunk(msgspec.Struct, frozen=True, array_like=True):
    """Tokens `start .. start + num_tokens` of a sequence are computed in this step."""

    sequence_id: SequenceId
    start: int
    num_tokens: int


class SampleRequest(msgspec.Struct, frozen=True, array_like=True):
    """Sample one token for `sequence_id` from the logits of the last token of chunk `chunk`.

    `chunk` indexes `StepPlan.chunks`. Several requests may name one chunk: the sequences of a
    group are all sampled from the prompt's last token before they part.
    """

    sequence_id: SequenceId
    chunk: int


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What every rank does in one step, in this order: drop, add, update, copy, compute, sample."""

    step_id: int
    dropped: tuple[SequenceId, ...] = ()
    added: tuple[NewSequence, ...] = ()
    updated: tuple[SequenceUpdate, ...] = ()
    copies: tuple[tuple[BlockId, BlockId], ...] = ()
    """(source, destination) pairs of whole blocks, done before any KV is written."""
    chunks: tuple[ScheduledChunk, ...] = ()
    samples: tuple[SampleRequest, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(chunk.num_tokens for chunk in self.chunks)


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """The acknowledgement of a step: its KV is written, and these tokens were drawn.

    `token_ids[i]` answers `StepPlan.samples[i]`; `logprobs[i]` likewise, None where not asked.
    """

    step_id: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs | None, ...] = ()


class FillingBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of one sequence that the step in flight fills to their last slot.

    They are numbers `first ..` of its table. Layer by layer their KV becomes final while the step
    runs; nobody may hit them before it is acknowledged.
    """

    step_id: int
    first: int
    block_ids: tuple[BlockId, ...]
