"""What a request asks of the sampler, checked once, at the door."""

import msgspec

from pageray.cluster.errors import InvalidParameterError

MAX_SEQUENCES_PER_REQUEST = 128
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to choose the next tokens. Names and meanings are vLLM's and OpenAI's.

    Order of the filters: penalties, temperature, top_k, top_p on the renormalised rest, min_p.
    Raises `InvalidParameterError` from `validate` only; construction alone checks nothing, so
    that the same bytes decode the same way in every process.
    """

    n: int = 1
    temperature: float = 1.0
    """0 means greedy: the token with the largest logit, lowest id among equals."""
    top_p: float = 1.0
    top_k: int = 0
    """Keep the k most likely tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    seed: int | None = None
    """With a seed, token i of sequence s is a function of (seed, s, i) and the logits alone."""
    max_tokens: int | None = None
    """None: as many as the model's context length leaves room for."""
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    """Report the chosen token's log-probability and those of this many most likely tokens."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    def validate(self, vocab_size: int) -> None:
        """Raise `InvalidParameterError` naming the field, its value and the allowed range."""
        _in_range("n", self.n, 1, MAX_SEQUENCES_PER_REQUEST)
        _in_range("temperature", self.temperature, 0.0, 100.0)
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidParameterError(
                f"top_p is {self.top_p}; it must be above 0 and at most 1.", param="top_p"
            )
        _in_range("top_k", self.top_k, -1, 2**31 - 1)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _in_range("seed", self.seed, -(2**63), 2**63 - 1)
        if self.max_tokens is not None:
            _in_range("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _in_range("min_tokens", self.min_tokens, 0, self.max_tokens or 2**31 - 1)
        if not 0.0 < self.repetition_penalty <= 100.0:
            raise InvalidParameterError(
                f"repetition_penalty is {self.repetition_penalty}; "
                "it must be above 0 and at most 100.",
                param="repetition_penalty",
            )
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.logprobs is not None:
            _in_range("logprobs", self.logprobs, 0, 20)
        _in_range("the number of stop strings", len(self.stop), 0, MAX_STOP_STRINGS, "stop")
        for text in self.stop:
            _in_range("the length of a stop string", len(text), 1, MAX_STOP_STRING_CHARS, "stop")
        _in_range(
            "the number of stop_token_ids",
            len(self.stop_token_ids),
            0,
            MAX_STOP_TOKEN_IDS,
            "stop_token_ids",
        )
        for token_id in self.stop_token_ids:
            _in_range("a stop token id", token_id, 0, vocab_size - 1, "stop_token_ids")


def _in_range(name: str, value: float, low: float, high: float, param: str | None = None) -> None:
    # `not (low <= value)` is also true for NaN, which a pair of plain comparisons would let by.
    if not low <= value <= high:
        raise InvalidParameterError(
            f"{name} is {value}; it must be between {low} and {high}.", param=param or name
        )
