"""A deterministic engine behind the router's `Engine` protocol: no model, no clock, faults on
demand. It answers with a script, by default the prompt's own tokens and then EOS."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field

from pageray.cluster.config import EngineConfig
from pageray.cluster.coordinator.errors import CoordinatorUnavailableError
from pageray.cluster.coordinator.messages import EngineInfo
from pageray.cluster.errors import ContextLengthError, EngineDeadError, PageRayError
from pageray.cluster.generation import (
    FinishReason,
    GenerateRequest,
    RequestOutput,
    SequenceOutput,
    TokenLogprobs,
)
from pageray.cluster.ids import BlockKey, RequestId
from pageray.cluster.member_spec import MemberSpec
from pageray.cluster.pull_counters import PullCounters

Script = Callable[[GenerateRequest, int], tuple[int, ...]]
"""(request, sequence index) -> all tokens of the reply, without EOS."""


def echo(request: GenerateRequest, index: int) -> tuple[int, ...]:
    """The prompt again, from token `index` on."""
    return request.prompt_token_ids[index:]


async def no_wait() -> None:
    """Steps follow each other as fast as the event loop turns."""
    await asyncio.sleep(0)


ROOT_KEY = BlockKey(b"scripted")


@dataclass(frozen=True)
class ScriptedStats:
    num_running: int
    num_waiting: int = 0
    num_blocks: int = 64
    num_held_blocks: int = 0
    num_computed_tokens: int = 0


@dataclass
class ScriptedEngine:
    """`before_step` is awaited before each step of each request: tests hold it to hold time."""

    script: Script = echo
    before_step: Callable[[], Awaitable[None]] = no_wait
    vocab_size: int = 49152
    max_model_len: int = 512
    eos_token_ids: tuple[int, ...] = (2,)
    capacity_tokens: int = 1024
    block_size: int = 16
    root_key: BlockKey = ROOT_KEY
    num_cached_tokens: int = 0
    refusal: PageRayError | None = None
    dies_after_tokens: int | None = None
    is_dead: bool = False
    is_shut_down: bool = False
    running: set[RequestId] = field(default_factory=set[RequestId])
    aborted: list[RequestId] = field(default_factory=list[RequestId])
    finished_early: list[tuple[RequestId, int]] = field(default_factory=list[tuple[RequestId, int]])
    requests: list[GenerateRequest] = field(default_factory=list[GenerateRequest])

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
        self.check_health()
        self._admit(request)
        self.requests.append(request)
        self.running.add(request.request_id)
        is_finished = False
        try:
            # Resumed sequences are all equally far in these tests.
            position = request.num_resumed_tokens
            alive = {
                index
                for index in range(request.sampling.n)
                if not (request.resumed and request.resumed[index].is_finished)
            }
            while alive:
                await self.before_step()
                if self.dies_after_tokens is not None and position >= self.dies_after_tokens:
                    self.is_dead = True
                    raise EngineDeadError("Rank 0 is gone.")
                alive -= {i for r, i in self.finished_early if r == request.request_id}
                sequences = [self._step(request, index, position) for index in sorted(alive)]
                alive -= {s.index for s in sequences if s.finish_reason is not None}
                position += 1
                is_finished = not alive
                yield RequestOutput(
                    request_id=request.request_id,
                    sequences=tuple(sequences),
                    num_prompt_tokens=len(request.prompt_token_ids),
                    num_cached_tokens=self.num_cached_tokens,
                    is_finished=is_finished,
                )
        finally:
            self.running.discard(request.request_id)
            if not is_finished:
                self.aborted.append(request.request_id)

    async def join(self, spec: MemberSpec) -> EngineInfo:
        raise CoordinatorUnavailableError("a scripted engine has no pages.")

    def finish_sequence(self, request_id: RequestId, index: int) -> None:
        self.finished_early.append((request_id, index))

    def check_health(self) -> None:
        if self.is_dead:
            raise EngineDeadError("Rank 0 is gone.")

    @property
    def pull_counters(self) -> PullCounters:
        return PullCounters()

    async def stats(self) -> ScriptedStats:
        return ScriptedStats(num_running=len(self.running))

    def shutdown(self) -> None:
        self.is_shut_down = True

    def _admit(self, request: GenerateRequest) -> None:
        if self.refusal is not None:
            raise self.refusal
        request.sampling.validate(self.vocab_size)
        wanted = len(request.prompt_token_ids) + (request.sampling.max_tokens or 1)
        if wanted > self.max_model_len:
            raise ContextLengthError(f"{wanted} tokens, above {self.max_model_len}.")

    def _step(self, request: GenerateRequest, index: int, position: int) -> SequenceOutput:
        reply = self.script(request, index)
        limit = request.sampling.max_tokens
        if position >= len(reply) and not request.sampling.ignore_eos:
            token_id, reason = self.eos_token_ids[0], FinishReason.STOP
        else:
            token_id = reply[position % len(reply)] if reply else self.eos_token_ids[0]
            is_stop = token_id in request.sampling.stop_token_ids
            is_last = limit is not None and position + 1 >= limit
            reason = FinishReason.STOP if is_stop else FinishReason.LENGTH if is_last else None
        return SequenceOutput(
            index=index,
            token_ids=(token_id,),
            position=position,
            finish_reason=reason,
            stop_token_id=token_id if reason is FinishReason.STOP else None,
            logprobs=_logprobs(token_id, position, request.sampling.logprobs),
        )


async def _one_step() -> None:
    await asyncio.sleep(STEP_S)


STEP_S = 0.02


def start_paced_engine(config: EngineConfig) -> ScriptedEngine:
    """An `EngineFactory` of an engine that takes `STEP_S` per step."""
    return ScriptedEngine(max_model_len=config.max_model_len or 512, before_step=_one_step)


def _logprobs(token_id: int, position: int, num_top: int | None) -> tuple[TokenLogprobs, ...]:
    if num_top is None:
        return ()
    best = -0.25 * (position + 1)
    top_ids = tuple(range(token_id, token_id + num_top))
    tops = tuple(best - rank for rank in range(num_top))
    return (TokenLogprobs(best, top_ids, tops),)
