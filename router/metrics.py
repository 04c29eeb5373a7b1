"""Engine metrics under the names that Ray's Serve LLM dashboard asks for.

They must be recorded in the replica's own process: the dashboard joins them to deployment and
replica by worker id. Ray puts `ray_` before each name.
"""

from collections.abc import Sequence
from dataclasses import replace

from ray.util.metrics import Counter, Gauge, Histogram

from pageray.cluster.pull_counters import PullCounters
from pageray.router.engine_protocol import EngineStatsView
from pageray.router.request_timer import RequestTimer

_MODEL_TAG = "model_name"
_REASON_TAG = "finished_reason"

_TOKEN_COUNTS = [1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144]
_SHORT_TIMES_S = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10]
_LONG_TIMES_S = [0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500]


class EngineMetrics:
    """Create one per replica."""

    def __init__(self, model_id: str) -> None:
        self._tags = {_MODEL_TAG: model_id}
        self._prompt_tokens = _histogram("vllm_request_prompt_tokens", _TOKEN_COUNTS)
        self._generation_tokens = _histogram("vllm_request_generation_tokens", _TOKEN_COUNTS)
        self._first_token_s = _histogram("vllm_time_to_first_token_seconds", _LONG_TIMES_S)
        self._token_gap_s = _histogram("vllm_request_time_per_output_token_seconds", _SHORT_TIMES_S)
        self._decode_s = _histogram("vllm_request_decode_time_seconds", _LONG_TIMES_S)
        self._latency_s = _histogram("vllm_e2e_request_latency_seconds", _LONG_TIMES_S)
        self._prompt_total = _counter("vllm_prompt_tokens_total")
        self._generation_total = _counter("vllm_generation_tokens_total")
        self._cache_queries = _counter("vllm_prefix_cache_queries_total")
        self._cache_hits = _counter("vllm_prefix_cache_hits_total")
        self._success = _counter("vllm_request_success_total", _REASON_TAG)
        self._pulls = {
            "num_predicted_blocks": _counter("pageray_pulled_blocks_predicted_total"),
            "num_delivered_blocks": _counter("pageray_pulled_blocks_delivered_total"),
            "num_pulls": _counter("pageray_pulls_total"),
            "num_failed_pulls": _counter("vllm_nixl_num_failed_transfers"),
            "num_bytes": _counter("vllm_nixl_bytes_transferred"),
        }
        """Under the dashboard's names where it has some, whatever the transport is."""
        self._external_queries = _counter("vllm_external_prefix_cache_queries_total")
        self._external_hits = _counter("vllm_external_prefix_cache_hits_total")
        self._pulled = PullCounters()
        self._kv_usage = _gauge("vllm_kv_cache_usage_perc")
        self._running = _gauge("vllm_num_requests_running")
        self._waiting = _gauge("vllm_num_requests_waiting")

    def record_request(self, timer: RequestTimer) -> None:
        """Record a request that has ended, however it did; without a token there is nothing."""
        if timer.time_to_first_token_s is None:
            return
        tags = self._tags
        self._prompt_tokens.observe(timer.num_prompt_tokens, tags)
        self._generation_tokens.observe(timer.num_generated_tokens, tags)
        self._first_token_s.observe(timer.time_to_first_token_s, tags)
        self._latency_s.observe(timer.total_s, tags)
        if timer.decode_s is not None:
            self._decode_s.observe(timer.decode_s, tags)
        if timer.time_per_output_token_s is not None:
            self._token_gap_s.observe(timer.time_per_output_token_s, tags)
        _add(self._prompt_total, timer.num_prompt_tokens, tags)
        _add(self._generation_total, timer.num_generated_tokens, tags)
        _add(self._cache_queries, timer.num_prompt_tokens, tags)
        _add(self._cache_hits, timer.num_cached_tokens, tags)
        for reason in timer.finish_reasons:
            self._success.inc(1, {**tags, _REASON_TAG: reason.value})

    def record_stats(self, stats: EngineStatsView) -> None:
        """Set the gauges; usage is a share from 0 to 1, whatever its name says."""
        self._kv_usage.set(stats.num_held_blocks / stats.num_blocks, self._tags)
        self._running.set(stats.num_running, self._tags)
        self._waiting.set(stats.num_waiting, self._tags)

    def record_pulls(self, counters: PullCounters, block_size: int) -> None:
        """Add what has been pulled since the last call."""
        predicted = counters.num_predicted_blocks - self._pulled.num_predicted_blocks
        delivered = counters.num_delivered_blocks - self._pulled.num_delivered_blocks
        # In tokens, as the counters of the engine's own cache.
        _add(self._external_queries, predicted * block_size, self._tags)
        _add(self._external_hits, delivered * block_size, self._tags)
        for name, metric in self._pulls.items():
            _add(metric, int(vars(counters)[name] - vars(self._pulled)[name]), self._tags)
        self._pulled = replace(counters)


def _histogram(name: str, boundaries: Sequence[float]) -> Histogram:
    return Histogram(name, boundaries=list(boundaries), tag_keys=(_MODEL_TAG,))


def _counter(name: str, *more_tags: str) -> Counter:
    return Counter(name, tag_keys=(_MODEL_TAG, *more_tags))


def _gauge(name: str) -> Gauge:
    return Gauge(name, tag_keys=(_MODEL_TAG,))


def _add(counter: Counter, amount: int, tags: dict[str, str]) -> None:
    # Ray's counters refuse to add nothing.
    if amount:
        counter.inc(amount, tags)
