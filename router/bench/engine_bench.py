"""One engine under a batch of equal requests: throughput, latency, memory waste."""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pageray.cluster.config import EngineConfig
from pageray.cluster.generation import GenerateRequest
from pageray.cluster.ids import RequestId
from pageray.cluster.sampling_params import SamplingParams
from pageray.router.bench.summary import Summary, summarize
from pageray.workers.engine import Engine, EngineStats


@dataclass(frozen=True, kw_only=True)
class EngineLoad:
    """`num_requests` requests at time zero, each `input_len` random tokens, of which the first
    `shared_len` are the same in all, continued greedily by exactly `output_len` tokens."""

    num_requests: int
    input_len: int
    output_len: int
    shared_len: int = 0
    seed: int = 0

    def requests(self, vocab_size: int) -> list[GenerateRequest]:
        rng = random.Random(self.seed)
        shared = [rng.randrange(vocab_size) for _ in range(self.shared_len)]
        sampling = SamplingParams(temperature=0.0, max_tokens=self.output_len, ignore_eos=True)
        return [
            GenerateRequest(
                request_id=RequestId(f"bench-{self.seed}-{number}"),
                prompt_token_ids=tuple(
                    shared
                    + [rng.randrange(vocab_size) for _ in range(self.input_len - self.shared_len)]
                ),
                sampling=sampling,
            )
            for number in range(self.num_requests)
        ]


@dataclass(frozen=True, kw_only=True)
class EngineFigures:
    """What one run gave. Times count from the moment all requests were handed over."""

    elapsed_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    """Prompt and output tokens."""
    ttft_ms: Summary
    """Time to a request's first token."""
    tpot_ms: Summary
    """Time per output token after the first, per request."""
    kv_waste: float
    """Mean over the steps: share of held token slots without a token."""
    preemptions: int
    num_steps: int
    computed_tokens: int


@dataclass
class _Timeline:
    first_s: float = 0.0
    last_s: float = 0.0
    num_tokens: int = 0

    def add(self, now_s: float, num_tokens: int) -> None:
        if self.num_tokens == 0:
            self.first_s = now_s
        self.last_s = now_s
        self.num_tokens += num_tokens

    @property
    def tpot_ms(self) -> float:
        return 1e3 * (self.last_s - self.first_s) / (self.num_tokens - 1)


@dataclass
class _Recording:
    timelines: dict[RequestId, _Timeline] = field(default_factory=dict[RequestId, _Timeline])
    waste: list[float] = field(default_factory=list[float])


def measure_engine(
    settings: Mapping[str, object],
    loads: Sequence[EngineLoad],
    on_tokens: Callable[[int], object],
) -> tuple[EngineFigures, str]:
    """Start an engine, run every load on it, stop it: the run with the median throughput, and
    the dtype that was computed in.

    `on_tokens` is told how many output tokens each step gave.
    """
    engine = Engine.start(EngineConfig.from_mapping(settings))
    try:
        runs = [run_engine_load(engine, load, on_tokens) for load in loads]
    finally:
        engine.shutdown()
    runs.sort(key=lambda figures: figures.output_tokens_per_s)
    return runs[len(runs) // 2], engine.found.dtype


def run_engine_load(
    engine: Engine, load: EngineLoad, on_tokens: Callable[[int], object]
) -> EngineFigures:
    """Run one load to its end."""
    requests = load.requests(engine.found.limits.vocab_size)
    before = engine.stats()
    recording = _Recording()
    start_s = time.perf_counter()
    for request in requests:
        engine.add(request)
        recording.timelines[request.request_id] = _Timeline()
    while engine.has_requests:
        outputs = engine.step()
        now_s = time.perf_counter() - start_s
        count = 0
        for output in outputs:
            num_tokens = sum(len(sequence.token_ids) for sequence in output.sequences)
            recording.timelines[output.request_id].add(now_s, num_tokens)
            count += num_tokens
        on_tokens(count)
        stats = engine.stats()
        if stats.num_held_slots:
            recording.waste.append(stats.kv_waste)
    return _figures(load, recording, time.perf_counter() - start_s, before, engine.stats())


def _figures(
    load: EngineLoad,
    recording: _Recording,
    elapsed_s: float,
    before: EngineStats,
    after: EngineStats,
) -> EngineFigures:
    timelines = list(recording.timelines.values())
    num_output = sum(timeline.num_tokens for timeline in timelines)
    return EngineFigures(
        elapsed_s=elapsed_s,
        output_tokens_per_s=num_output / elapsed_s,
        total_tokens_per_s=(num_output + load.num_requests * load.input_len) / elapsed_s,
        ttft_ms=summarize([1e3 * timeline.first_s for timeline in timelines]),
        tpot_ms=summarize([line.tpot_ms for line in timelines if line.num_tokens > 1]),
        kv_waste=sum(recording.waste) / max(1, len(recording.waste)),
        preemptions=after.num_preemptions - before.num_preemptions,
        num_steps=after.num_steps - before.num_steps,
        computed_tokens=after.num_computed_tokens - before.num_computed_tokens,
    )
