"""Continuous batching: which tokens of which sequences the next step computes.

There is no prefill phase and no decode phase. Every sequence has tokens, and some of them are
computed; a step spends a budget of tokens on the difference, running sequences first, in order
of arrival. `schedule` returns a `StepPlan`, `update` takes its `StepResult`; between the two the
step is in flight, and nothing it touches is given to anyone else.

Pure: no clock, no randomness, no torch. The same requests give the same plans.
"""

import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from pageray.cluster.admission import EngineLimits, request_seed, resolve_max_tokens
from pageray.cluster.block_keys import BlockHasher
from pageray.cluster.block_pool import BlockPool
from pageray.cluster.errors import InvalidParameterError
from pageray.cluster.generation import (
    FinishReason,
    GenerateRequest,
    RequestOutput,
    ResumedSequence,
    SequenceOutput,
    TokenLogprobs,
)
from pageray.cluster.ids import BlockId, BlockKey, RequestId, SequenceId
from pageray.cluster.memory_plan import blocks_for_tokens
from pageray.cluster.prefix_index import Publication
from pageray.cluster.prefix_run import find_run
from pageray.cluster.sequence import GroupState, Sequence, SequenceGroup
from pageray.cluster.step import (
    FillingBlocks,
    NewSequence,
    SampleRequest,
    ScheduledChunk,
    SequenceUpdate,
    StepPlan,
    StepResult,
)
from pageray.cluster.token_budget import TokenBudget, long_from

WAITING_LOOKAHEAD = 64
"""How many waiting requests are looked at to see whether short work is at hand."""

MIN_COMING_BLOCKS = 4
"""A prefix that somebody else is computing is waited for from this length on: for less, waiting
for the end of the other's step costs more than it saves."""


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Settings that shape a step; the meanings are `EngineConfig`'s."""

    max_num_batched_tokens: int
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    engine_seed: int = 0


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the start."""

    num_steps: int = 0
    num_preemptions: int = 0
    num_computed_tokens: int = 0
    prefix_queries_tokens: int = 0
    """Prompt tokens looked up in the cache, at the first admission of each request."""
    prefix_hits_tokens: int = 0
    """Of those, tokens whose pages were there. Never more than the queries."""


@dataclass(slots=True)
class _Draft:
    """What one group adds to the plan; thrown away if the group is preempted on the way."""

    chunks: list[tuple[Sequence, ScheduledChunk]] = field(
        default_factory=list[tuple[Sequence, ScheduledChunk]]
    )
    copies: list[tuple[BlockId, BlockId]] = field(default_factory=list[tuple[BlockId, BlockId]])
    samples: list[tuple[Sequence, int]] = field(default_factory=list[tuple[Sequence, int]])
    """(sequence, index into this draft's `chunks`)."""


class Scheduler:
    """Owns the groups, their block tables and, through the pool, every reference to a block.

    Not thread-safe: one thread calls everything.
    """

    def __init__(
        self, config: SchedulerConfig, limits: EngineLimits, pool: BlockPool, hasher: BlockHasher
    ) -> None:
        self._config = config
        self._limits = limits
        self._pool = pool
        self._hasher = hasher
        self._groups: dict[RequestId, SequenceGroup] = {}
        self._waiting: deque[SequenceGroup] = deque()
        self._running: list[SequenceGroup] = []
        """In order of arrival: admission is first come, first served."""
        self._dropped: list[SequenceId] = []
        self._in_flight: StepPlan | None = None
        self._in_flight_groups: dict[SequenceId, SequenceGroup] = {}
        self._sequence_ids = itertools.count(1)
        self._step_ids = itertools.count(1)
        self.stats = SchedulerStats()

    # --- requests -----------------------------------------------------------------------------

    def add(self, request: GenerateRequest) -> None:
        """Queue a request. Raises a `ClientError` for one that can never be served."""
        if request.request_id in self._groups:
            raise InvalidParameterError(
                f"Request id {request.request_id!r} is already being served.", param="request_id"
            )
        max_tokens = resolve_max_tokens(request, self._limits)
        seed = request_seed(request, self._config.engine_seed)
        resumed = request.resumed or (ResumedSequence(),) * request.sampling.n
        sequences = tuple(
            Sequence(
                sequence_id=SequenceId(next(self._sequence_ids)),
                index=index,
                seed=seed,
                num_prompt_tokens=len(request.prompt_token_ids),
                token_ids=[*request.prompt_token_ids, *earlier.output_token_ids],
                finish_reason=FinishReason.STOP if earlier.is_finished else None,
            )
            for index, earlier in enumerate(resumed)
        )
        group = SequenceGroup(request=request, max_tokens=max_tokens, sequences=sequences)
        self._groups[request.request_id] = group
        self._waiting.append(group)

    def abort(self, request_id: RequestId) -> bool:
        """End a request without further output. False if it is not (or no longer) known.

        Its blocks are released at once, or at the acknowledgement of the step in flight.
        """
        group = self._groups.get(request_id)
        if group is None:
            return False
        if self._in_flight is not None and group.state is GroupState.RUNNING:
            group.is_aborted = True
        else:
            self._end(group)
        return True

    def finish_sequence(self, request_id: RequestId, index: int) -> bool:
        """End one sequence of a request because its stop string was found.

        False if it is not running any more. No output reports it: the caller knows.
        """
        group = self._groups.get(request_id)
        if group is None or not 0 <= index < len(group.sequences):
            return False
        sequence = group.sequences[index]
        if sequence.is_finished:
            return False
        if self._in_flight is not None and group.state is GroupState.RUNNING:
            sequence.is_stop_requested = True
        else:
            self._finish(group, sequence, FinishReason.STOP)
        return True

    @property
    def has_requests(self) -> bool:
        return bool(self._groups)

    @property
    def num_waiting(self) -> int:
        """Requests that hold no blocks: not admitted yet, or preempted."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    # --- one step -----------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """The next step, now in flight until `update`; None when there is nothing to compute."""
        if self._in_flight is not None:
            raise RuntimeError(f"step {self._in_flight.step_id} has not been acknowledged yet.")
        budget = TokenBudget(
            self._config.max_num_batched_tokens,
            has_short_work=self._config.enable_chunked_prefill and self._has_short_work(),
            min_chunk=self._limits.block_size,
        )
        num_preemptions = self.stats.num_preemptions
        drafts: list[tuple[SequenceGroup, _Draft]] = []
        # The list shrinks from its end while we walk it: victims are the latest arrivals, which
        # have not been drafted yet.
        while len(drafts) < len(self._running):
            group = self._running[len(drafts)]
            draft = self._draft(group, budget)
            if draft is not None:
                drafts.append((group, draft))
        # Blocks just taken from a victim are not for newcomers, or the two would take turns.
        if self.stats.num_preemptions == num_preemptions:
            self._admit(budget, drafts)
        return self._plan(drafts)

    def update(self, result: StepResult) -> list[RequestOutput]:
        """Acknowledge the step in flight: publish what it wrote, append what it sampled.

        Returns the news, one output per request that gained tokens.
        """
        plan = self._in_flight
        if plan is None or result.step_id != plan.step_id:
            expected = None if plan is None else plan.step_id
            raise RuntimeError(f"result of step {result.step_id}; in flight is {expected}.")
        groups = self._in_flight_groups
        self._in_flight, self._in_flight_groups = None, {}
        for source, _ in plan.copies:
            self._pool.unpin(source)
        for chunk in plan.chunks:
            group = groups[chunk.sequence_id]
            sequence = _member(group, chunk.sequence_id)
            sequence.num_computed = chunk.start + chunk.num_tokens
            self._publish(group, sequence)
        self.stats.num_steps += 1
        self.stats.num_computed_tokens += plan.num_tokens
        return self._collect(plan, result, groups)

    def _collect(
        self, plan: StepPlan, result: StepResult, groups: dict[SequenceId, SequenceGroup]
    ) -> list[RequestOutput]:
        """Append sampled tokens, end what ends, and report per request."""
        news: dict[RequestId, list[SequenceOutput]] = {}
        logprobs = result.logprobs or (None,) * len(result.token_ids)
        for sample, token_id, logprob in zip(plan.samples, result.token_ids, logprobs, strict=True):
            group = groups[sample.sequence_id]
            if group.is_aborted:
                continue
            sequence = _member(group, sample.sequence_id)
            output = self._append(group, sequence, token_id, logprob)
            news.setdefault(group.request.request_id, []).append(output)
        outputs: list[RequestOutput] = []
        for group in dict.fromkeys(groups.values()):
            if group.is_aborted:
                self._end(group)
                continue
            for sequence in group.unfinished:
                if sequence.is_stop_requested:
                    self._finish(group, sequence, FinishReason.STOP)
            sequences = news.get(group.request.request_id)
            if sequences:
                outputs.append(_request_output(group, sequences))
        return outputs

    # --- running sequences ----------------------------------------------------------------------

    def _draft(self, group: SequenceGroup, budget: TokenBudget) -> _Draft | None:
        """Reserve blocks for what `group` computes in this step.

        Out of blocks, the latest arrivals are preempted, whole groups at a time. None if the
        group itself was the latest left.
        """
        draft = _Draft()
        leader = group.leader
        if not leader.is_started:
            self._start(leader, self._hits(group, leader))
        # A list made now: a sibling that forks in this step starts in the next one, since block
        # copies run before the step's KV is written.
        for sequence in [member for member in group.unfinished if member.is_started]:
            num_remaining = sequence.num_remaining
            num_tokens = budget.chunk_for(num_remaining, self._num_reserved(group, num_remaining))
            if num_tokens == 0 or self._must_wait_for_whole(num_tokens, num_remaining):
                continue
            while not self._reserve(sequence, num_tokens, draft):
                if not self._preempt_latest(group):
                    self._discard(draft, budget)
                    self._preempt(group)
                    return None
            budget.spend(num_tokens, num_remaining)
            chunk = ScheduledChunk(sequence.sequence_id, sequence.num_computed, num_tokens)
            if num_tokens == num_remaining:
                draft.samples.append((sequence, len(draft.chunks)))
            draft.chunks.append((sequence, chunk))
            if sequence is leader:
                self._fork_siblings(group, leader, chunk, draft)
        return draft

    def _must_wait_for_whole(self, num_tokens: int, num_remaining: int) -> bool:
        return num_tokens < num_remaining and not self._config.enable_chunked_prefill

    def _num_reserved(self, group: SequenceGroup, num_remaining: int) -> int:
        """Tokens to keep for running sequences that come later and need just one: a prompt's
        chunk never costs another sequence its next token."""
        if num_remaining == 1:
            return 0
        later = itertools.dropwhile(lambda other: other is not group, self._running)
        return sum(
            sequence.is_started and sequence.num_remaining == 1
            for other in later
            if other is not group
            for sequence in other.unfinished
        )

    def _reserve(self, sequence: Sequence, num_tokens: int, draft: _Draft) -> bool:
        """Extend the table to hold `num_tokens` more, and make its write position writable.

        Writing into a block that others share (or that is published) copies it first. False,
        and nothing changed, when the pool is short.
        """
        size = self._limits.block_size
        tail = sequence.num_computed // size
        must_copy = tail < len(sequence.table) and not self._pool.is_writable(sequence.table[tail])
        num_new = blocks_for_tokens(sequence.num_computed + num_tokens, size) - len(sequence.table)
        blocks = self._pool.allocate(max(0, num_new) + must_copy)
        if blocks is None:
            return False
        if must_copy:
            source, copy = sequence.table[tail], blocks.pop()
            # Until the copy has run, nobody may be given the source to write to.
            self._pool.pin(source)
            draft.copies.append((source, copy))
            sequence.table[tail] = copy
            sequence.known_blocks = min(sequence.known_blocks, tail)
            self._pool.release([source])
        sequence.table.extend(blocks)
        return True

    def _fork_siblings(
        self, group: SequenceGroup, leader: Sequence, chunk: ScheduledChunk, draft: _Draft
    ) -> None:
        """Once the leader's chunk completes the prompt, its siblings share the prompt's blocks.

        A sibling without output is sampled from the leader's last prompt token in this step; one
        that comes back from a preemption computes its own output tokens from the next step on.
        """
        num_prompt = group.num_prompt_tokens
        if chunk.start + chunk.num_tokens < num_prompt:
            return
        num_shared = blocks_for_tokens(num_prompt, self._limits.block_size)
        for sibling in group.unfinished:
            if sibling.is_started:
                continue
            sibling.is_started = True
            sibling.table = leader.table[:num_shared]
            self._pool.acquire(sibling.table)
            sibling.num_computed = num_prompt
            if sibling.num_output_tokens == 0:
                draft.samples.append((sibling, len(draft.chunks) - 1))

    def _discard(self, draft: _Draft, budget: TokenBudget) -> None:
        for source, _ in draft.copies:
            self._pool.unpin(source)
        for sequence, chunk in draft.chunks:
            budget.spend(-chunk.num_tokens, sequence.num_remaining)

    def _preempt_latest(self, group: SequenceGroup) -> bool:
        """Preempt the latest arrival; False if that is `group` itself."""
        if self._running[-1] is group:
            return False
        self._preempt(self._running[-1])
        return True

    def _preempt(self, group: SequenceGroup) -> None:
        """Take all blocks from a group and put it first in the queue, to be recomputed.

        Its published blocks stay cached: what is not evicted meanwhile is hit again.
        """
        for sequence in group.unfinished:
            self._release(sequence)
        self._running.remove(group)
        group.state = GroupState.WAITING
        self._waiting.appendleft(group)
        self.stats.num_preemptions += 1

    # --- waiting groups ---------------------------------------------------------------------------

    def _admit(self, budget: TokenBudget, drafts: list[tuple[SequenceGroup, _Draft]]) -> None:
        """Admit waiting groups, first come first served, while budget, sequence slots and blocks
        last.

        A group whose prefix a running sequence is just computing waits for it, and is overtaken
        meanwhile: the tokens are computed once, and it starts from there.
        """
        coming = self._coming_keys() if self._config.enable_prefix_caching else set[BlockKey]()
        overtaken: list[SequenceGroup] = []
        while self._waiting and budget.left > 0 and len(overtaken) < WAITING_LOOKAHEAD:
            group = self._waiting[0]
            hits = self._hits(group, group.leader)
            if self._is_prefix_coming(group.leader, len(hits), coming):
                overtaken.append(self._waiting.popleft())
            elif self._can_admit(group, hits, budget):
                self._waiting.popleft()
                drafts.append((group, self._start_group(group, hits, budget)))
                coming.update(content.key for content in group.leader.contents[len(hits) :])
            else:
                break
        self._waiting.extendleft(reversed(overtaken))

    def _can_admit(
        self, group: SequenceGroup, hits: list[Publication], budget: TokenBudget
    ) -> bool:
        """Whether all its tokens fit beside what was promised to the running groups, or it would
        soon be preempted again."""
        num_sequences = sum(len(each.unfinished) for each in (*self._running, group))
        if num_sequences > self._limits.max_num_seqs:
            return False
        num_promised = sum(self._num_owed(each) for each in self._running)
        num_owed = self._num_owed(group) - len(hits)
        num_taken = self._pool.num_reusable(hit.block_id for hit in hits)
        if num_promised + num_owed + num_taken > self._pool.num_available:
            return False
        num_remaining = group.leader.num_tokens - len(hits) * self._limits.block_size
        return not self._must_wait_for_whole(budget.chunk_for(num_remaining, 0), num_remaining)

    def _start_group(
        self, group: SequenceGroup, hits: list[Publication], budget: TokenBudget
    ) -> _Draft:
        self._start(group.leader, hits)
        self._count_lookup(group, group.leader)
        group.state = GroupState.RUNNING
        self._running.append(group)
        draft = self._draft(group, budget)
        assert draft is not None, "the blocks were counted before admission"
        return draft

    def _coming_keys(self) -> set[BlockKey]:
        """Of the full blocks that running sequences are computing and will publish."""
        return {
            content.key
            for group in self._running
            if not group.is_aborted
            for sequence in group.unfinished
            if sequence.is_started and sequence.can_publish
            for content in sequence.contents[len(sequence.publications) :]
        }

    def _is_prefix_coming(self, leader: Sequence, num_hits: int, coming: set[BlockKey]) -> bool:
        """Whether enough of what the leader lacks is being computed to be worth a wait."""
        ahead = leader.contents[num_hits : num_hits + MIN_COMING_BLOCKS]
        return len(ahead) == MIN_COMING_BLOCKS and all(content.key in coming for content in ahead)

    def _num_owed(self, group: SequenceGroup) -> int:
        """Blocks that the group's known tokens will still take from the pool."""
        size = self._limits.block_size
        num_shared = group.num_prompt_tokens // size
        owed = 0
        for position, sequence in enumerate(group.unfinished):
            num_blocks = blocks_for_tokens(sequence.num_tokens, size)
            if sequence.is_started or position == 0:
                owed += max(0, num_blocks - len(sequence.table))
            else:
                owed += num_blocks - num_shared
        return owed

    def _hits(self, group: SequenceGroup, sequence: Sequence) -> list[Publication]:
        """The longest run of published blocks that starts the sequence, without taking any.

        At least one token is left to compute: its logits are needed.
        """
        if not self._config.enable_prefix_caching:
            return []
        self._hasher.extend(sequence.contents, sequence.token_ids, group.request.cache_salt)
        num_usable = (sequence.num_tokens - 1) // self._limits.block_size
        return find_run(self._pool, sequence.contents[:num_usable])

    def _start(self, leader: Sequence, hits: list[Publication]) -> None:
        """Give the leader its table, beginning with the blocks that were hit (acquired here)."""
        leader.is_started = True
        leader.table = [hit.block_id for hit in hits]
        self._pool.acquire(leader.table)
        leader.publications = [hit.publication_id for hit in hits]
        leader.num_computed = len(hits) * self._limits.block_size

    def _count_lookup(self, group: SequenceGroup, leader: Sequence) -> None:
        if group.num_cached_tokens is not None:
            return
        # The leader of a resumed group may find output tokens too.
        group.num_cached_tokens = min(leader.num_computed, group.num_prompt_tokens)
        self.stats.prefix_queries_tokens += group.num_prompt_tokens
        self.stats.prefix_hits_tokens += group.num_cached_tokens

    def _has_short_work(self) -> bool:
        """Whether some prompt that is not long has tokens to compute."""
        limit = long_from(self._config.max_num_batched_tokens)
        running = (
            1 < sequence.num_remaining <= limit
            for group in self._running
            for sequence in group.unfinished
            if sequence.is_started
        )
        waiting = (
            group.leader.num_tokens <= limit
            for group in itertools.islice(self._waiting, WAITING_LOOKAHEAD)
        )
        return any(running) or any(waiting)

    # --- plans and tokens -------------------------------------------------------------------------

    def _plan(self, drafts: list[tuple[SequenceGroup, _Draft]]) -> StepPlan | None:
        chunks: list[ScheduledChunk] = []
        samples: list[SampleRequest] = []
        copies: list[tuple[BlockId, BlockId]] = []
        added: list[NewSequence] = []
        updated: list[SequenceUpdate] = []
        for group, draft in drafts:
            involved = [sequence for sequence, _ in draft.chunks]
            involved += [sequence for sequence, _ in draft.samples if sequence not in involved]
            for sequence in involved:
                self._in_flight_groups[sequence.sequence_id] = group
                if sequence.is_known:
                    updated.extend(_update_of(sequence))
                else:
                    added.append(_introduction_of(sequence, group))
                sequence.is_known = True
                sequence.known_tokens = sequence.num_tokens
                sequence.known_blocks = len(sequence.table)
            samples += [
                SampleRequest(sequence.sequence_id, len(chunks) + position)
                for sequence, position in draft.samples
            ]
            chunks += [chunk for _, chunk in draft.chunks]
            copies += draft.copies
        if not chunks:
            return None
        self._in_flight = StepPlan(
            step_id=next(self._step_ids),
            dropped=tuple(self._dropped),
            added=tuple(added),
            updated=tuple(updated),
            copies=tuple(copies),
            chunks=tuple(chunks),
            samples=tuple(samples),
        )
        self._dropped = []
        return self._in_flight

    def _publish(self, group: SequenceGroup, sequence: Sequence) -> None:
        """Publish the blocks that are full and computed now."""
        if not self._config.enable_prefix_caching or group.is_aborted:
            return
        num_full = sequence.num_computed // self._limits.block_size
        if len(sequence.publications) >= num_full:
            return
        self._hasher.extend(sequence.contents, sequence.token_ids, group.request.cache_salt)
        while sequence.can_publish and len(sequence.publications) < num_full:
            position = len(sequence.publications)
            publication_id = self._pool.publish(
                sequence.table[position], sequence.contents[position], sequence.last_publication
            )
            if publication_id is None:
                sequence.can_publish = False
            else:
                sequence.publications.append(publication_id)

    def _append(
        self,
        group: SequenceGroup,
        sequence: Sequence,
        token_id: int,
        logprob: TokenLogprobs | None,
    ) -> SequenceOutput:
        """Append a sampled token, and end the sequence if that ends it."""
        position = sequence.num_output_tokens
        sequence.token_ids.append(token_id)
        sampling = group.request.sampling
        is_stop = token_id in sampling.stop_token_ids or (
            not sampling.ignore_eos and token_id in self._limits.eos_token_ids
        )
        reason = None
        if is_stop and sequence.num_output_tokens >= sampling.min_tokens:
            reason = FinishReason.STOP
        elif sequence.num_output_tokens >= group.max_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._finish(group, sequence, reason)
        return SequenceOutput(
            index=sequence.index,
            token_ids=(token_id,),
            position=position,
            finish_reason=reason,
            stop_token_id=token_id if reason is FinishReason.STOP else None,
            logprobs=() if logprob is None else (logprob,),
        )

    def _finish(self, group: SequenceGroup, sequence: Sequence, reason: FinishReason) -> None:
        """End one sequence and release its blocks; the request ends with its last sequence."""
        self._release(sequence)
        sequence.finish_reason = reason
        if not group.unfinished:
            self._end(group)

    def _end(self, group: SequenceGroup) -> None:
        """Release whatever the group holds and forget the request."""
        for sequence in group.unfinished:
            self._release(sequence)
            sequence.finish_reason = FinishReason.ABORT
        if group.state is GroupState.RUNNING:
            self._running.remove(group)
        else:
            self._waiting.remove(group)
        del self._groups[group.request.request_id]

    def _release(self, sequence: Sequence) -> None:
        self._pool.release(sequence.table)
        if sequence.is_known:
            self._dropped.append(sequence.sequence_id)
        sequence.forget_blocks()

    def clear_prefix_cache(self) -> None:
        """Forget every published block. Running sequences go on, but publish nothing more: their
        chains hang from publications that no longer exist."""
        self._pool.clear_cache()
        for sequence in self._sequences():
            sequence.publications = []
            sequence.can_publish = False

    # --- looking in -------------------------------------------------------------------------------

    def slot_usage(self) -> tuple[int, int]:
        """(token slots in held blocks, those of them that hold a token), shared blocks once."""
        size = self._limits.block_size
        filled: dict[BlockId, int] = {}
        for sequence in self._sequences():
            for position, block_id in enumerate(sequence.table):
                used = min(size, max(0, sequence.num_computed - position * size))
                filled[block_id] = max(used, filled.get(block_id, 0))
        return len(filled) * size, sum(filled.values())

    def filling_blocks(self, request_id: RequestId) -> FillingBlocks | None:
        """What the step in flight fills of a request's leader; None if nothing."""
        group = self._groups.get(request_id)
        if self._in_flight is None or group is None or not group.unfinished:
            return None
        leader, size = group.leader, self._limits.block_size
        for chunk in self._in_flight.chunks:
            if chunk.sequence_id == leader.sequence_id:
                first, end = chunk.start // size, (chunk.start + chunk.num_tokens) // size
                if first == end:
                    return None
                return FillingBlocks(
                    step_id=self._in_flight.step_id,
                    first=first,
                    block_ids=tuple(leader.table[first:end]),
                )
        return None

    @property
    def num_spare_blocks(self) -> int:
        """Blocks that the running sequences' known tokens leave to others."""
        num_promised = sum(self._num_owed(group) for group in self._running)
        return max(0, self._pool.num_available - num_promised)

    @property
    def num_queued_tokens(self) -> int:
        """Tokens of admitted and waiting requests whose KV is still to be computed, less the one
        per running sequence that every step computes."""
        running = sum(
            sequence.num_remaining - 1
            for group in self._running
            for sequence in group.unfinished
            if sequence.is_started
        )
        return running + sum(group.leader.num_tokens for group in self._waiting)

    def check_invariants(self, other_tables: Iterable[list[BlockId]] = ()) -> None:
        """Assert that tables, counts and queues agree. For tests, and idle moments.

        `other_tables`: those that hold references beside the sequences'.
        """
        own = [sequence.table for sequence in self._sequences()]
        others = list(other_tables)
        self._pool.check_invariants([*own, *others])
        members = [*self._running, *self._waiting]
        assert len(members) == len(self._groups) == len(set(members))
        for group in members:
            assert self._groups[group.request.request_id] is group
            assert group.unfinished, "a group without unfinished sequences is still queued"
            assert (group.state is GroupState.WAITING) == (group in self._waiting)
            for sequence in group.sequences:
                _check_sequence(sequence, group, self._limits.block_size)
        if self._in_flight is None and not self._groups and not others:
            num_pinned = self._pool.num_pinned
            assert self._pool.num_held == num_pinned, (
                f"{self._pool.num_held} blocks are held, {num_pinned} are pinned"
            )

    def _sequences(self) -> Iterator[Sequence]:
        for group in self._groups.values():
            yield from group.sequences


def _member(group: SequenceGroup, sequence_id: SequenceId) -> Sequence:
    # Ids of a group are consecutive, in order of index.
    return group.sequences[sequence_id - group.sequences[0].sequence_id]


def _introduction_of(sequence: Sequence, group: SequenceGroup) -> NewSequence:
    return NewSequence(
        sequence_id=sequence.sequence_id,
        index=sequence.index,
        seed=sequence.seed,
        token_ids=tuple(sequence.token_ids),
        num_prompt_tokens=sequence.num_prompt_tokens,
        block_ids=tuple(sequence.table),
        sampling=group.request.sampling,
    )


def _update_of(sequence: Sequence) -> Iterator[SequenceUpdate]:
    """What the ranks do not know yet of a sequence they know; nothing if they know it all."""
    new_tokens = tuple(sequence.token_ids[sequence.known_tokens :])
    new_blocks = tuple(sequence.table[sequence.known_blocks :])
    if new_tokens or new_blocks:
        yield SequenceUpdate(sequence.sequence_id, new_tokens, sequence.known_blocks, new_blocks)


def _request_output(group: SequenceGroup, sequences: list[SequenceOutput]) -> RequestOutput:
    return RequestOutput(
        request_id=group.request.request_id,
        sequences=tuple(sequences),
        num_prompt_tokens=group.num_prompt_tokens,
        num_cached_tokens=group.num_cached_tokens or 0,
        is_finished=not group.unfinished,
    )


def _check_sequence(sequence: Sequence, group: SequenceGroup, block_size: int) -> None:
    if sequence.is_finished or group.state is GroupState.WAITING:
        assert not sequence.table, "a finished or waiting sequence holds blocks"
        return
    assert sequence.is_started or not sequence.table
    assert sequence.num_computed <= sequence.num_tokens
    assert len(sequence.table) >= blocks_for_tokens(sequence.num_computed, block_size)
    assert sequence.known_blocks <= len(sequence.table)
    assert sequence.known_tokens <= sequence.num_tokens
    assert len(sequence.publications) <= sequence.num_computed // block_size
