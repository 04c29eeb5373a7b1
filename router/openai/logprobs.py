"""Log-probabilities of the engine in OpenAI's two forms."""

from collections.abc import Sequence

from pageray.cluster.generation import TokenLogprobs
from pageray.router.openai.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    TokenLogprob,
    TopLogprob,
)
from pageray.router.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0
"""JSON has no infinity; OpenAI writes this for a token that cannot come."""


def chat_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> ChatLogprobs:
    """One entry per token; `logprobs[i]` belongs to `token_ids[i]`."""
    content = [
        TokenLogprob(
            token=(text := _text(tokenizer, token_id)),
            logprob=_finite(entry.token_logprob),
            bytes=list(text.encode()),
            top_logprobs=_top(tokenizer, entry),
        )
        for token_id, entry in zip(token_ids, logprobs, strict=True)
    ]
    return ChatLogprobs(content=content)


def completion_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
    first_offset: int,
) -> CompletionLogprobs:
    """`first_offset`: characters of the choice's tokens before these."""
    tokens = [_text(tokenizer, token_id) for token_id in token_ids]
    offsets: list[int] = []
    offset = first_offset
    for text in tokens:
        offsets.append(offset)
        offset += len(text)
    return CompletionLogprobs(
        tokens=tokens,
        token_logprobs=[_finite(entry.token_logprob) for entry in logprobs],
        top_logprobs=[
            {top.token: top.logprob for top in reversed(_top(tokenizer, entry))}
            for entry in logprobs
        ],
        text_offset=offsets,
    )


def _top(tokenizer: Tokenizer, entry: TokenLogprobs) -> list[TopLogprob]:
    return [
        TopLogprob(
            token=(text := _text(tokenizer, token_id)),
            logprob=_finite(logprob),
            bytes=list(text.encode()),
        )
        for token_id, logprob in zip(entry.top_token_ids, entry.top_logprobs, strict=True)
    ]


def _text(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.decode([token_id], skip_special_tokens=False)


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
