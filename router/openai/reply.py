"""What the replies to chat completions and completions have in common."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

import msgspec

from pageray.cluster.generation import FinishReason
from pageray.router.completion_run import ChoiceDelta, CompletionRun
from pageray.router.openai import sse
from pageray.router.openai.responses import PromptTokensDetails, Usage
from pageray.router.sequence_text import TextDelta


@dataclass(frozen=True, kw_only=True)
class ReplyOptions:
    """What a reply repeats of its request."""

    id: str
    created: int
    """Seconds since 1970."""
    model: str
    has_logprobs: bool
    includes_usage: bool
    """Whether a stream ends with a chunk that carries `usage`."""


class Reply(Protocol):
    """The form of one endpoint's answer."""

    options: ReplyOptions

    def whole(self, deltas: Sequence[TextDelta], usage: Usage) -> msgspec.Struct:
        """The body of a reply that is not streamed; `deltas[i]` is all of choice i."""
        ...

    def opening(self, num_choices: int) -> list[msgspec.Struct]:
        """Chunks that go out together with the first text."""
        ...

    def chunk(self, news: ChoiceDelta) -> msgspec.Struct: ...

    def closing(self, usage: Usage) -> msgspec.Struct:
        """The chunk without choices that carries `usage`."""
        ...


async def whole_reply(run: CompletionRun, reply: Reply) -> msgspec.Struct:
    """Run to the end; raises what the run raises."""
    whole = [TextDelta(text="", token_ids=(), logprobs=())] * run.num_choices
    async with aclosing(run.deltas()) as batches:
        async for batch in batches:
            for news in batch:
                whole[news.index] = whole[news.index].followed_by(news.delta)
    return reply.whole(whole, usage_of(run))


async def event_stream(run: CompletionRun, reply: Reply) -> AsyncGenerator[bytes, None]:
    """Server-sent events up to and including `[DONE]`; raises what the run raises."""
    chunks = reply.opening(run.num_choices)
    async with aclosing(run.deltas()) as batches:
        async for batch in batches:
            chunks.extend(reply.chunk(news) for news in batch)
            yield sse.events(chunks)
            chunks = []
    if reply.options.includes_usage:
        yield sse.events([reply.closing(usage_of(run))])
    yield sse.DONE


def usage_of(run: CompletionRun) -> Usage:
    return Usage(
        prompt_tokens=run.num_prompt_tokens,
        completion_tokens=run.num_completion_tokens,
        total_tokens=run.num_prompt_tokens + run.num_completion_tokens,
        prompt_tokens_details=PromptTokensDetails(run.num_cached_tokens),
    )


def finish_reason_name(reason: FinishReason | None) -> str | None:
    return None if reason is None else reason.value
