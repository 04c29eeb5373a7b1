"""Sampling settings through a whole engine, on a small random model."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from model_folder import llama_config, save_small_model
from pageray.cluster.config import EngineConfig
from pageray.cluster.generation import FinishReason, GenerateRequest, SequenceOutput
from pageray.cluster.ids import RequestId
from pageray.cluster.sampling_params import SamplingParams
from pageray.workers.engine import Engine

PROMPT = (3, 14, 15, 92, 65)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small-llama")
    save_small_model(path, llama_config(max_position_embeddings=256))
    return path


def start(folder: Path, **settings: object) -> Engine:
    return Engine.start(
        EngineConfig.from_mapping(
            {
                "model": str(folder),
                "device": "cpu",
                "block_size": 4,
                "num_gpu_blocks_override": 200,
                "max_num_seqs": 32,
                "max_num_batched_tokens": 64,
                "cpu_threads_per_rank": 1,
                **settings,
            }
        )
    )


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    engine = start(folder)
    yield engine
    engine.shutdown()


def request_of(name: str, **sampling: object) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId(name),
        prompt_token_ids=PROMPT,
        sampling=SamplingParams(**sampling),  # pyright: ignore[reportArgumentType]
    )


def run(engine: Engine, requests: list[GenerateRequest]) -> dict[str, dict[int, list[int]]]:
    """Tokens by request and sequence."""
    tokens: dict[str, dict[int, list[int]]] = {}
    for output in outputs_of(engine, requests):
        tokens.setdefault(output[0], {}).setdefault(output[1].index, []).extend(output[1].token_ids)
    return tokens


def outputs_of(engine: Engine, requests: list[GenerateRequest]) -> list[tuple[str, SequenceOutput]]:
    for request in requests:
        engine.add(request)
    outputs: list[tuple[str, SequenceOutput]] = []
    while engine.has_requests:
        for output in engine.step():
            outputs += [(output.request_id, sequence) for sequence in output.sequences]
        engine.check_invariants()
    return outputs


def test_seeded_tokens_do_not_depend_on_the_batch(engine: Engine) -> None:
    alone = run(engine, [request_of("a", seed=7, max_tokens=20, ignore_eos=True, n=3)])["a"]
    crowd = [request_of(f"o{i}", seed=i, max_tokens=25, ignore_eos=True) for i in range(9)]
    crowded = run(engine, [*crowd, request_of("a", seed=7, max_tokens=20, ignore_eos=True, n=3)])[
        "a"
    ]
    assert crowded == alone
    assert len({tuple(tokens) for tokens in alone.values()}) == 3


def test_seeded_tokens_survive_preemption(folder: Path, engine: Engine) -> None:
    requests = [
        request_of(f"r{i}", seed=i, max_tokens=40, ignore_eos=True, n=1 + i % 2) for i in range(6)
    ]
    calm = run(engine, requests)
    tight = start(folder, num_gpu_blocks_override=34)
    try:
        assert run(tight, requests) == calm
        assert tight.stats().num_preemptions > 0
    finally:
        tight.shutdown()


def test_unseeded_requests_differ_but_repeat_under_their_id(engine: Engine) -> None:
    first = run(engine, [request_of(f"r{i}", max_tokens=10, ignore_eos=True) for i in range(4)])
    again = run(engine, [request_of(f"r{i}", max_tokens=10, ignore_eos=True) for i in range(4)])
    assert first == again
    assert len({tuple(tokens[0]) for tokens in first.values()}) == 4


def test_greedy_is_top_k_of_one(engine: Engine) -> None:
    tokens = run(
        engine,
        [
            request_of("greedy", temperature=0.0, max_tokens=12, ignore_eos=True),
            request_of("top1", top_k=1, max_tokens=12, ignore_eos=True),
            request_of("min_p", min_p=1.0, max_tokens=12, ignore_eos=True),
            request_of("top_p", top_p=1e-6, max_tokens=12, ignore_eos=True),
        ],
    )
    assert tokens["greedy"] == tokens["top1"] == tokens["min_p"] == tokens["top_p"]


def test_min_tokens_keeps_stop_tokens_out(engine: Engine) -> None:
    free = run(engine, [request_of("a", temperature=0.0, max_tokens=12, ignore_eos=True)])["a"][0]
    stop = free[2]
    outputs = outputs_of(
        engine, [request_of("a", temperature=0.0, max_tokens=12, stop_token_ids=(stop,))]
    )
    tokens = [token for _, output in outputs for token in output.token_ids]
    assert tokens == free[: free.index(stop) + 1]
    assert outputs[-1][1].finish_reason is FinishReason.STOP
    assert outputs[-1][1].stop_token_id == stop
    later = run(
        engine,
        [request_of("a", temperature=0.0, max_tokens=12, min_tokens=6, stop_token_ids=(stop,))],
    )["a"][0]
    assert stop not in later[:6]
    assert len(later) >= 6


def test_strong_presence_penalty_never_repeats(engine: Engine) -> None:
    plain = run(engine, [request_of("a", temperature=0.0, max_tokens=40, ignore_eos=True)])["a"][0]
    penalised = run(
        engine,
        [
            request_of(
                "a",
                temperature=0.0,
                max_tokens=40,
                ignore_eos=True,
                repetition_penalty=100.0,
            )
        ],
    )["a"][0]
    assert max(Counter(plain).values()) > 1
    assert max(Counter(penalised).values()) < max(Counter(plain).values())


def test_logprobs_are_those_of_the_model(engine: Engine) -> None:
    outputs = outputs_of(
        engine,
        [
            request_of("a", temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=3),
            request_of("b", temperature=0.0, max_tokens=5, ignore_eos=True),
        ],
    )
    for name, output in outputs:
        if name == "b":
            assert output.logprobs == ()
            continue
        (entry,) = output.logprobs
        assert len(entry.top_token_ids) == len(entry.top_logprobs) == 3
        assert entry.top_token_ids[0] == output.token_ids[0]
        assert entry.token_logprob == pytest.approx(entry.top_logprobs[0])
        assert list(entry.top_logprobs) == sorted(entry.top_logprobs, reverse=True)
        assert sum(2.718281828**value for value in entry.top_logprobs) <= 1.0 + 1e-6
