"""The two messages between whoever admits a request and the engine that serves it."""

import enum

import msgspec

from pageray.cluster.coordinator.messages import EngineInfo
from pageray.cluster.ids import RequestId
from pageray.cluster.sampling_params import SamplingParams


class FinishReason(enum.Enum):
    """Why a sequence ended; the values are OpenAI's."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class ResumedSequence(msgspec.Struct, frozen=True, array_like=True):
    """What one sequence of a request had produced before this engine got it."""

    output_token_ids: tuple[int, ...] = ()
    is_finished: bool = False


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt as token ids, and how to continue it.

    `cache_salt` separates prefix caches: requests share pages only with an equal salt.

    `resumed` is empty, or has an entry for each of the `sampling.n` sequences: the request ran on
    another engine and goes on here with the next token, exactly as it would have there. Limits,
    penalties and the sampler's counter see the resumed tokens as output.
    """

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: str = ""
    resumed: tuple[ResumedSequence, ...] = ()
    pull_from: EngineInfo | None = None
    """An engine that has computed this request's tokens: its pages are worth asking for."""
    pull_num_blocks: int = 0
    """How many leading blocks it is known to have; 0: perhaps all."""
    session_id: str = ""
    """Requests of one session go to one engine where that costs little."""

    @property
    def known_token_ids(self) -> tuple[int, ...]:
        """The prompt, and the output so far where there is one sequence only."""
        if len(self.resumed) != 1:
            return self.prompt_token_ids
        return self.prompt_token_ids + self.resumed[0].output_token_ids

    @property
    def num_resumed_tokens(self) -> int:
        """Of the sequence that got furthest."""
        return max((len(each.output_token_ids) for each in self.resumed), default=0)


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
    position: int = 0
    """Of the first of `token_ids` among all output tokens of the sequence, resumed ones
    included: whoever collects outputs of several engines can tell a hole and a repetition."""
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
