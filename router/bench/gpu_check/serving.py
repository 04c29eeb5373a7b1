"""One engine under a few loads, with CUDA graphs and without: tokens per second, and the tokens."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pageray.cluster.config import EngineConfig
from pageray.cluster.ids import RequestId
from pageray.router.bench.engine_bench import EngineLoad
from pageray.router.bench.gpu_check.findings import ServingRow
from pageray.workers.engine import Engine

_LOADS = tuple(
    EngineLoad(num_requests=count, input_len=128, output_len=256) for count in (1, 16, 64, 256)
)
_QUICK_LOADS = (EngineLoad(num_requests=2, input_len=8, output_len=4),)
_WARM_UP_SEED = 1

Tokens = dict[RequestId, list[int]]


@dataclass(frozen=True, kw_only=True)
class _Run:
    tokens_per_s: float
    tokens: Tokens


def measure_serving(
    settings: Mapping[str, object], is_quick: bool, on_row: Callable[[int], object]
) -> list[ServingRow]:
    """A row for every load. `settings`: `EngineConfig`'s fields but `enforce_eager`; `on_row(1)`
    after each load of each engine."""
    loads = _QUICK_LOADS if is_quick else _LOADS
    graphs, dtype = _run_all({**settings, "enforce_eager": False}, loads, on_row)
    eager, _ = _run_all({**settings, "enforce_eager": True}, loads, on_row)
    return [
        ServingRow(
            model=str(settings["model"]),
            dtype=dtype,
            num_requests=load.num_requests,
            input_len=load.input_len,
            output_len=load.output_len,
            graph_tokens_per_s=with_graphs.tokens_per_s,
            eager_tokens_per_s=without.tokens_per_s,
            num_equal=sum(
                tokens == without.tokens[request] for request, tokens in with_graphs.tokens.items()
            ),
        )
        for load, with_graphs, without in zip(loads, graphs, eager, strict=True)
    ]


def num_runs(is_quick: bool) -> int:
    return 2 * len(_QUICK_LOADS if is_quick else _LOADS)


def _run_all(
    settings: Mapping[str, object], loads: tuple[EngineLoad, ...], on_row: Callable[[int], object]
) -> tuple[list[_Run], str]:
    engine = Engine.start(EngineConfig.from_mapping(settings))
    runs: list[_Run] = []
    try:
        for load in loads:
            # Other tokens of the same shape: whatever is slow the first time is over after it.
            _run(
                engine,
                EngineLoad(
                    num_requests=load.num_requests,
                    input_len=load.input_len,
                    output_len=4,
                    seed=_WARM_UP_SEED,
                ),
            )
            runs.append(_run(engine, load))
            on_row(1)
        return runs, engine.found.dtype
    finally:
        engine.shutdown()


def _run(engine: Engine, load: EngineLoad) -> _Run:
    tokens: Tokens = {}
    begun_s = time.perf_counter()
    for request in load.requests(engine.found.limits.vocab_size):
        tokens[request.request_id] = []
        engine.add(request)
    while engine.has_requests:
        for output in engine.step():
            for sequence in output.sequences:
                tokens[output.request_id] += sequence.token_ids
    elapsed_s = time.perf_counter() - begun_s
    return _Run(tokens_per_s=sum(map(len, tokens.values())) / elapsed_s, tokens=tokens)
