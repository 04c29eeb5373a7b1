"""When things happened to one request; the clock is the caller's."""

from pageray.cluster.generation import FinishReason, RequestOutput


class RequestTimer:
    """Watches the outputs of one request. Times are seconds of a monotonic clock."""

    def __init__(self, now_s: float) -> None:
        self._start_s = now_s
        self._first_token_s: float | None = None
        self._last_token_s = now_s
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_generated_tokens = 0
        self.finish_reasons: list[FinishReason] = []

    def observe(self, output: RequestOutput, now_s: float) -> None:
        num_tokens = sum(len(sequence.token_ids) for sequence in output.sequences)
        if num_tokens and self._first_token_s is None:
            self._first_token_s = now_s
        self._last_token_s = now_s
        self.num_prompt_tokens = output.num_prompt_tokens
        self.num_cached_tokens = output.num_cached_tokens
        self.num_generated_tokens += num_tokens
        self.finish_reasons.extend(
            sequence.finish_reason
            for sequence in output.sequences
            if sequence.finish_reason is not None
        )

    @property
    def time_to_first_token_s(self) -> float | None:
        """None while no token has come."""
        return None if self._first_token_s is None else self._first_token_s - self._start_s

    @property
    def decode_s(self) -> float | None:
        """From the first token to the last."""
        return None if self._first_token_s is None else self._last_token_s - self._first_token_s

    @property
    def time_per_output_token_s(self) -> float | None:
        """Mean gap between tokens of one sequence after the first; None below two tokens."""
        num_sequences = max(1, len(self.finish_reasons))
        gaps = self.num_generated_tokens / num_sequences - 1
        return None if self.decode_s is None or gaps <= 0 else self.decode_s / gaps

    @property
    def total_s(self) -> float:
        return self._last_token_s - self._start_s
