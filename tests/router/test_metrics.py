"""What is measured of a request."""

import pytest
from ray.util.metrics import Metric

from pageray.cluster.generation import FinishReason, RequestOutput, SequenceOutput
from pageray.cluster.ids import RequestId
from pageray.cluster.pull_counters import PullCounters
from pageray.router.metrics import EngineMetrics
from pageray.router.request_timer import RequestTimer
from scripted_engine import ScriptedStats


def output(num_tokens: int, reason: FinishReason | None = None) -> RequestOutput:
    sequence = SequenceOutput(index=0, token_ids=(1,) * num_tokens, finish_reason=reason)
    return RequestOutput(
        request_id=RequestId("r"),
        sequences=(sequence,),
        num_prompt_tokens=10,
        num_cached_tokens=4,
    )


def finished_timer() -> RequestTimer:
    timer = RequestTimer(100.0)
    timer.observe(output(0), 100.5)
    timer.observe(output(1), 101.0)
    timer.observe(output(3), 101.6)
    timer.observe(output(1, FinishReason.STOP), 103.0)
    return timer


def test_times_of_a_request() -> None:
    timer = finished_timer()
    assert timer.time_to_first_token_s == 1.0
    assert timer.total_s == 3.0
    assert timer.decode_s == 2.0
    assert timer.time_per_output_token_s == pytest.approx(0.5)
    assert (timer.num_prompt_tokens, timer.num_generated_tokens) == (10, 5)


def test_a_request_without_a_token_has_no_times() -> None:
    timer = RequestTimer(1.0)
    assert timer.time_to_first_token_s is None
    assert timer.time_per_output_token_s is None


def test_recorded_under_the_dashboards_names(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: dict[str, tuple[float, dict[str, str]]] = {}

    def record(self: Metric, value: float, tags: dict[str, str] | None = None, **_: object) -> None:
        recorded[self.info["name"]] = (value, dict(tags or {}))

    for kind, method in (("Counter", "inc"), ("Histogram", "observe"), ("Gauge", "set")):
        monkeypatch.setattr(f"ray.util.metrics.{kind}.{method}", record)
    metrics = EngineMetrics("m")
    metrics.record_request(finished_timer())
    metrics.record_stats(ScriptedStats(num_running=3, num_waiting=2, num_held_blocks=16))
    tags = {"model_name": "m"}
    assert recorded == {
        "vllm_request_prompt_tokens": (10, tags),
        "vllm_request_generation_tokens": (5, tags),
        "vllm_time_to_first_token_seconds": (1.0, tags),
        "vllm_request_time_per_output_token_seconds": (pytest.approx(0.5), tags),
        "vllm_request_decode_time_seconds": (2.0, tags),
        "vllm_e2e_request_latency_seconds": (3.0, tags),
        "vllm_prompt_tokens_total": (10, tags),
        "vllm_generation_tokens_total": (5, tags),
        "vllm_prefix_cache_queries_total": (10, tags),
        "vllm_prefix_cache_hits_total": (4, tags),
        "vllm_request_success_total": (1, {**tags, "finished_reason": "stop"}),
        "vllm_kv_cache_usage_perc": (0.25, tags),
        "vllm_num_requests_running": (3, tags),
        "vllm_num_requests_waiting": (2, tags),
    }


def test_pulls_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    totals: dict[str, float] = {}

    def add(self: Metric, value: float, tags: dict[str, str] | None = None) -> None:
        totals[self.info["name"]] = totals.get(self.info["name"], 0) + value

    monkeypatch.setattr("ray.util.metrics.Counter.inc", add)
    metrics = EngineMetrics("m")
    counters = PullCounters(num_pulls=2, num_predicted_blocks=7, num_delivered_blocks=5)
    metrics.record_pulls(counters, block_size=16)
    metrics.record_pulls(counters, block_size=16)
    counters.num_pulls, counters.num_failed_pulls, counters.num_bytes = 4, 1, 1000
    metrics.record_pulls(counters, block_size=16)
    assert totals == {
        "vllm_external_prefix_cache_queries_total": 7 * 16,
        "vllm_external_prefix_cache_hits_total": 5 * 16,
        "pageray_pulled_blocks_predicted_total": 7,
        "pageray_pulled_blocks_delivered_total": 5,
        "pageray_pulls_total": 4,
        "vllm_nixl_num_failed_transfers": 1,
        "vllm_nixl_bytes_transferred": 1000,
    }
