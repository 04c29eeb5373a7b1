"""Is it faster to pull pages or to compute them?"""

DEFAULT_PREFILL_TOKENS_PER_S = 5_000.0
DEFAULT_PULL_BYTES_PER_S = 10e9
"""Hopeful: a rate is measured only by pulling, and one pull tells."""
PULL_RATE_LIFE_S = 10.0
"""A rate not measured for so long is hoped for again: it may have been that of a bad moment."""
MIN_MEASURED_BLOCKS = 4
"""Smaller pulls are all latency and say nothing of the rate."""
PULL_LATENCY_S = 0.005
"""Two messages between engines, and the wait for a lock."""
_SLOW_BYTES_PER_S = 0.1e9
_MIN_TIMEOUT_S, _MAX_TIMEOUT_S = 1.0, 30.0


def recompute_s(num_tokens: int, prefill_tokens_per_s: float) -> float:
    """Seconds to compute the KV of `num_tokens`; a rate of 0 is one not measured yet."""
    return num_tokens / (prefill_tokens_per_s or DEFAULT_PREFILL_TOKENS_PER_S)


def pull_s(num_bytes: int, pull_bytes_per_s: float) -> float:
    """Seconds to pull pages; a rate of 0 is one not measured yet."""
    return PULL_LATENCY_S + num_bytes / (pull_bytes_per_s or DEFAULT_PULL_BYTES_PER_S)


def pull_timeout_s(num_bytes: int) -> float:
    """How long a pull may take before it is given up and its tokens are computed."""
    return min(_MAX_TIMEOUT_S, _MIN_TIMEOUT_S + num_bytes / _SLOW_BYTES_PER_S)
