"""The two messages between whoever admits a request and the engine that serves it."""

import enum

import msgspec

from pageray.cluster.ids import RequestId
from pageray.cluster.sampling_params import SamplingParams


class FinishReason(enum.Enum):
    """Why a sequence ended; the values are OpenAI's."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt as token ids, and how to continue it.

    `cache_salt` separates prefix caches: requests share pages only with an equal salt.
    """

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: str = ""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probabilities at one position, before temperature and filters."""

    token_logprob: float
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class SequenceOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What one sequence of a request gained since the last output.

    `index` counts the sequences of the request from 0 to n-1. `token_ids` excludes nothing: an
    EOS or stop token that ended the sequence is its last element. `logprobs`, when asked for, is
    as long as `token_ids`.
    """

    index: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The EOS or stop token that ended the sequence (the last of `token_ids`), if one did."""
    logprobs: tuple[TokenLogprobs, ...] = ()


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One engine step's news about one request.

    `num_cached_tokens`: prompt tokens served from cached pages rather than computed.
    """

    request_id: RequestId
    sequences: tuple[SequenceOutput, ...]
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    is_finished: bool = False
