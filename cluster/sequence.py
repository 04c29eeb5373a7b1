"""Sequences and the groups they come in: the scheduler's own state of a request."""

import enum
from dataclasses import dataclass, field

from pageray.cluster.block_keys import BlockContent
from pageray.cluster.generation import FinishReason, GenerateRequest
from pageray.cluster.ids import BlockId, SequenceId
from pageray.cluster.prefix_index import NO_PARENT, PublicationId


@dataclass(slots=True, eq=False)
class Sequence:
    """One stream of tokens with one block table.

    `token_ids`: prompt and output. `num_computed` of them have their KV in the blocks of `table`
    (acknowledged). `contents[i]` identifies the i-th full block of `token_ids`;
    `publications` names the published prefix of the table and stops growing after a collision.

    `known_tokens` and `known_blocks` say how much of both the ranks have been told; they are 0
    while the ranks do not know the sequence (`is_known`).
    """

    sequence_id: SequenceId
    index: int
    seed: int
    num_prompt_tokens: int
    token_ids: list[int]
    num_computed: int = 0
    table: list[BlockId] = field(default_factory=list[BlockId])
    contents: list[BlockContent] = field(default_factory=list[BlockContent])
    publications: list[PublicationId] = field(default_factory=list[PublicationId])
    can_publish: bool = True
    finish_reason: FinishReason | None = None
    is_stop_requested: bool = False
    """Its stop string was found while a step was in flight: it ends at the acknowledgement."""
    is_started: bool = False
    """Whether it has a table: the leader from admission on, the others from the fork on."""
    is_known: bool = False
    known_tokens: int = 0
    known_blocks: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_remaining(self) -> int:
        """Tokens whose KV is still to be computed."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def last_publication(self) -> PublicationId:
        return self.publications[-1] if self.publications else NO_PARENT

    def forget_blocks(self) -> None:
        """Back to the state of a sequence that nothing was computed for.

        The caller has released the table and told the ranks.
        """
        self.table = []
        self.num_computed = 0
        self.publications = []
        self.can_publish = True
        self.is_started = False
        self.is_known = False
        self.known_tokens = 0
        self.known_blocks = 0


class GroupState(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """The sequences of one request: admitted, preempted and aborted together or not at all.

    The first unfinished sequence is the leader. It computes the prompt; the others fork from its
    blocks in the step that completes the prompt, and part from it by copy-on-write.
    """

    request: GenerateRequest
    max_tokens: int
    """Resolved: never None, within context length and pool capacity."""
    sequences: tuple[Sequence, ...]
    state: GroupState = GroupState.WAITING
    is_aborted: bool = False
    """Aborted while a step was in flight: released at that step's acknowledgement."""
    num_cached_tokens: int | None = None
    """Prompt tokens found in the cache at first admission; None before it."""

    @property
    def unfinished(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if not sequence.is_finished]

    @property
    def leader(self) -> Sequence:
        """Raises IndexError on a group that has finished."""
        return self.unfinished[0]

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)
