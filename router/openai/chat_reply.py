"""The reply of `/v1/chat/completions`."""

from collections.abc import Sequence

import msgspec

from pageray.router.completion_run import ChoiceDelta
from pageray.router.openai.logprobs import chat_logprobs
from pageray.router.openai.reply import ReplyOptions, finish_reason_name
from pageray.router.openai.responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    ChatMessageOut,
    Usage,
)
from pageray.router.sequence_text import TextDelta
from pageray.router.tokenizer import Tokenizer

_ROLE = "assistant"


class ChatReply:
    """Implements `Reply`."""

    def __init__(self, options: ReplyOptions, tokenizer: Tokenizer) -> None:
        self.options = options
        self._tokenizer = tokenizer

    def whole(self, deltas: Sequence[TextDelta], usage: Usage) -> ChatCompletion:
        choices = [
            ChatChoice(
                index=index,
                message=ChatMessageOut(role=_ROLE, content=delta.text),
                logprobs=self._logprobs(delta),
                finish_reason=finish_reason_name(delta.finish_reason) or "",
                stop_reason=delta.stop_reason,
            )
            for index, delta in enumerate(deltas)
        ]
        return ChatCompletion(
            id=self.options.id,
            created=self.options.created,
            model=self.options.model,
            choices=choices,
            usage=usage,
        )

    def opening(self, num_choices: int) -> list[msgspec.Struct]:
        role = ChatDelta(role=_ROLE, content="")
        return [self._chunk(ChatChunkChoice(index=i, delta=role)) for i in range(num_choices)]

    def chunk(self, news: ChoiceDelta) -> ChatCompletionChunk:
        delta = news.delta
        return self._chunk(
            ChatChunkChoice(
                index=news.index,
                delta=ChatDelta(content=delta.text or None),
                logprobs=self._logprobs(delta),
                finish_reason=finish_reason_name(delta.finish_reason),
                stop_reason=delta.stop_reason,
            )
        )

    def closing(self, usage: Usage) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self.options.id,
            created=self.options.created,
            model=self.options.model,
            choices=[],
            usage=usage,
        )

    def _chunk(self, choice: ChatChunkChoice) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self.options.id,
            created=self.options.created,
            model=self.options.model,
            choices=[choice],
            usage=None if self.options.includes_usage else msgspec.UNSET,
        )

    def _logprobs(self, delta: TextDelta) -> ChatLogprobs | None:
        if not self.options.has_logprobs:
            return None
        return chat_logprobs(self._tokenizer, delta.token_ids, delta.logprobs)
