"""How long a step may take before its ranks are taken for stuck."""

_FLOOR_S = 20.0
"""No step is given up sooner: a busy machine makes anything slow for a while."""
_FACTOR = 20.0
"""A step may take so many times what its tokens took at the slowest lately."""
_LARGE_STEP_TOKENS = 64
"""Steps below and above are so different per token that each is compared with its own kind."""
_FADE = 0.95


class StepClock:
    """Learns from the steps that came back. A rank that is stopped rather than dead makes no
    progress, and nothing else tells."""

    def __init__(self, limit_s: float) -> None:
        """`limit_s`: the longest anything may take, and the patience while nothing is known."""
        self._limit_s = limit_s
        self._slowest_s_per_token: dict[bool, float] = {}

    def observe(self, num_tokens: int, seconds: float) -> None:
        is_large = num_tokens >= _LARGE_STEP_TOKENS
        before = self._slowest_s_per_token.get(is_large, 0.0)
        self._slowest_s_per_token[is_large] = max(_FADE * before, seconds / max(1, num_tokens))

    def timeout_s(self, num_tokens: int) -> float:
        slowest = self._slowest_s_per_token.get(num_tokens >= _LARGE_STEP_TOKENS)
        if slowest is None:
            return self._limit_s
        return min(self._limit_s, max(_FLOOR_S, _FACTOR * slowest * num_tokens))
