"""The reply of `/v1/completions`."""

from collections.abc import Sequence

import msgspec

from pageray.router.completion_run import ChoiceDelta
from pageray.router.openai.logprobs import completion_logprobs
from pageray.router.openai.reply import ReplyOptions, finish_reason_name
from pageray.router.openai.responses import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Usage,
)
from pageray.router.sequence_text import TextDelta
from pageray.router.tokenizer import Tokenizer


class CompletionReply:
    """Implements `Reply`; one object per request, since it counts text offsets."""

    def __init__(self, options: ReplyOptions, tokenizer: Tokenizer) -> None:
        self.options = options
        self._tokenizer = tokenizer
        self._offsets: dict[int, int] = {}
        """Choice index to the number of characters of its tokens so far."""

    def whole(self, deltas: Sequence[TextDelta], usage: Usage) -> Completion:
        choices = [self._choice(index, delta) for index, delta in enumerate(deltas)]
        return self._completion(choices, usage)

    def opening(self, num_choices: int) -> list[msgspec.Struct]:
        return []

    def chunk(self, news: ChoiceDelta) -> Completion:
        usage = None if self.options.includes_usage else msgspec.UNSET
        return self._completion([self._choice(news.index, news.delta)], usage)

    def closing(self, usage: Usage) -> Completion:
        return self._completion([], usage)

    def _completion(
        self, choices: list[CompletionChoice], usage: Usage | msgspec.UnsetType | None
    ) -> Completion:
        return Completion(
            id=self.options.id,
            created=self.options.created,
            model=self.options.model,
            choices=choices,
            usage=usage,
        )

    def _choice(self, index: int, delta: TextDelta) -> CompletionChoice:
        return CompletionChoice(
            index=index,
            text=delta.text,
            logprobs=self._logprobs(index, delta),
            finish_reason=finish_reason_name(delta.finish_reason),
            stop_reason=delta.stop_reason,
        )

    def _logprobs(self, index: int, delta: TextDelta) -> CompletionLogprobs | None:
        if not self.options.has_logprobs:
            return None
        offset = self._offsets.get(index, 0)
        logprobs = completion_logprobs(self._tokenizer, delta.token_ids, delta.logprobs, offset)
        self._offsets[index] = offset + sum(len(token) for token in logprobs.tokens)
        return logprobs
