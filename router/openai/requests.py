"""Request bodies of the HTTP endpoints. Validated strictly: "5" is not a number."""

from typing import Literal

import pydantic

from pageray.cluster.errors import InvalidParameterError
from pageray.router.openai.sampling import GenerationFields

MAX_MESSAGES = 4096
MAX_PROMPTS = 128
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions; chat completions have none."""

Role = Literal["system", "developer", "user", "assistant", "tool"]


class ContentPart(pydantic.BaseModel):
    """One part of a message. Only text can be served; other types are refused by name."""

    model_config = pydantic.ConfigDict(extra="ignore")

    type: str
    text: str | None = None


class ChatMessage(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="ignore")

    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[object] | None = None

    def as_template_input(self, position: int) -> dict[str, object]:
        """The message with its content as one string; raises `InvalidParameterError` for
        content that is not text."""
        if self.tool_calls:
            raise InvalidParameterError(
                "Messages with tool_calls are not supported here.",
                param=f"messages.{position}.tool_calls",
            )
        fields: dict[str, object] = {"role": self.role, "content": self._text(position)}
        if self.name is not None:
            fields["name"] = self.name
        return fields

    def _text(self, position: int) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        texts: list[str] = []
        for part in self.content:
            if part.type != "text" or part.text is None:
                raise InvalidParameterError(
                    f"Message content of type {part.type[:100]!r} is not supported; "
                    "this model reads text only.",
                    param=f"messages.{position}.content",
                )
            texts.append(part.text)
        return "\n".join(texts)


class ChatFields(pydantic.BaseModel):
    """How messages become a prompt."""

    messages: list[ChatMessage] = pydantic.Field(min_length=1, max_length=MAX_MESSAGES)
    add_generation_prompt: bool | None = None
    """None: true, except with `continue_final_message`."""
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    """None: false, since a chat template writes the special tokens itself."""
    chat_template_kwargs: dict[str, object] | None = None


class ChatCompletionRequest(GenerationFields, ChatFields):
    max_completion_tokens: int | None = None
    """OpenAI's newer name of `max_tokens`; wins when both are given."""
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @property
    def output_limit(self) -> int | None:
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer

    @property
    def num_logprobs(self) -> int | None:
        """None when the client wants none; 0 wants the chosen tokens' only."""
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise InvalidParameterError(
                "top_logprobs needs logprobs to be true.", param="top_logprobs"
            )
        return None


class CompletionRequest(GenerationFields):
    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = None
    add_special_tokens: bool | None = None
    """None: true. Prompts of token ids are taken as they are."""

    @property
    def output_limit(self) -> int:
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one; raises `InvalidParameterError` for none or too many."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise InvalidParameterError("prompt is empty.", param="prompt")
        if isinstance(prompt[0], int):
            return [[token for token in prompt if isinstance(token, int)]]
        if len(prompt) > MAX_PROMPTS:
            raise InvalidParameterError(
                f"prompt holds {len(prompt)} prompts; at most {MAX_PROMPTS} fit in one request.",
                param="prompt",
            )
        return [item for item in prompt if not isinstance(item, int)]


class TokenizeRequest(pydantic.BaseModel):
    """Either `prompt`, or `messages` with the chat fields."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = pydantic.Field(default=None, max_length=MAX_MESSAGES)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(pydantic.BaseModel):
    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool = False
