"""The fields of a request that become `SamplingParams`."""

from typing import TypeVar

import msgspec
import pydantic

from pageray.cluster.sampling_params import SamplingParams

T = TypeVar("T")


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What a model's `generation_config.json` recommends, for requests that do not say."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class StreamOptions(pydantic.BaseModel):
    include_usage: bool | None = None


class GenerationFields(pydantic.BaseModel):
    """Fields that chat completions and completions share: OpenAI's, then vLLM's additions.

    `None` means not given. Ranges are checked by `SamplingParams.validate`, which every way into
    the engine goes through.
    """

    model: str
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: str | None = pydantic.Field(default=None, max_length=1024)

    @property
    def includes_usage_in_stream(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling_params(
        self, defaults: SamplingDefaults, *, max_tokens: int | None, logprobs: int | None
    ) -> SamplingParams:
        """Not validated yet; `max_tokens` and `logprobs` differ between the two endpoints."""
        return SamplingParams(
            n=_or(self.n, 1),
            temperature=_or(self.temperature, defaults.temperature),
            top_p=_or(self.top_p, defaults.top_p),
            top_k=_or(self.top_k, defaults.top_k),
            min_p=_or(self.min_p, defaults.min_p),
            repetition_penalty=_or(self.repetition_penalty, defaults.repetition_penalty),
            presence_penalty=_or(self.presence_penalty, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            seed=self.seed,
            max_tokens=max_tokens,
            min_tokens=_or(self.min_tokens, 0),
            stop=_strings(self.stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
            logprobs=logprobs,
        )


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _strings(value: str | list[str] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)
