"""A whole engine with graphs gives the tokens of one without."""

import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fake_graphs import FakeGraphBackend
from model_folder import llama_config, random_prompts, save_small_model
from pageray.cluster.config import EngineConfig
from pageray.cluster.generation import GenerateRequest
from pageray.cluster.ids import RequestId
from pageray.cluster.sampling_params import SamplingParams
from pageray.workers.engine import Engine
from pageray.workers.graphs.backend import GraphBackendFactory
from pageray.workers.page_pool import PagePool
from pageray.workers.ranks import in_process

SETTINGS = {
    "device": "cpu",
    "dtype": "float32",
    "block_size": 4,
    "num_gpu_blocks_override": 60,
    "max_num_seqs": 12,
    "max_num_batched_tokens": 20,
    "cuda_graph_sizes": [1, 2, 4, 8],
    "cpu_threads_per_rank": 1,
}
LENGTHS = (3, 17, 30, 1, 8, 9, 12, 25, 4)

Outputs = dict[tuple[str, int], list[int]]


def requests() -> list[GenerateRequest]:
    """Of different lengths, and ending at different steps; some with several sequences."""
    return [
        GenerateRequest(
            request_id=RequestId(str(number)),
            prompt_token_ids=tuple(ids),
            sampling=SamplingParams(
                temperature=0.0 if number % 3 else 0.8,
                max_tokens=5 + 3 * number,
                n=2 if number % 4 == 0 else 1,
                presence_penalty=0.5 if number % 2 else 0.0,
                seed=number,
                ignore_eos=True,
            ),
        )
        for number, ids in enumerate(random_prompts(101, LENGTHS))
    ]


def run(folder: Path) -> tuple[Outputs, int]:
    engine = Engine.start(EngineConfig.from_mapping({"model": str(folder), **SETTINGS}))
    outputs: Outputs = {}
    try:
        waiting = requests()
        while waiting or engine.has_requests:
            if waiting:
                engine.add(waiting.pop())
            for output in engine.step():
                for sequence in output.sequences:
                    tokens = outputs.setdefault((output.request_id, sequence.index), [])
                    tokens += sequence.token_ids
        return outputs, engine.stats().num_steps
    finally:
        engine.shutdown()


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> FakeGraphBackend:
    """What every engine of the test captures with."""
    backend = FakeGraphBackend()

    def factory(config: EngineConfig, device: torch.device) -> GraphBackendFactory:
        return lambda: backend

    monkeypatch.setattr(in_process, "graph_backend_factory", factory)
    return backend


def test_tokens_are_those_of_an_eager_engine(
    tmp_path: Path, backend: FakeGraphBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_small_model(tmp_path, llama_config())
    tokens, num_steps = run(tmp_path)
    assert backend.num_captured == 4
    assert num_steps // 4 < backend.num_replays < num_steps
    monkeypatch.undo()
    num_replays = backend.num_replays
    assert run(tmp_path) == (tokens, num_steps)
    assert backend.num_replays == num_replays


def test_an_engine_that_is_shut_down_holds_no_pool(
    tmp_path: Path, backend: FakeGraphBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one in this process sizes its own by what is free; nothing waits for the
    collector of cycles."""
    pools: list[weakref.ref[Tensor]] = []
    allocate = PagePool.allocate

    def noted(*arguments: object) -> PagePool:
        pool = allocate(*arguments)  # pyright: ignore[reportArgumentType]
        pools.append(weakref.ref(pool.tensor))
        return pool

    monkeypatch.setattr(PagePool, "allocate", noted)
    save_small_model(tmp_path, llama_config())
    gc.disable()
    try:
        run(tmp_path)
        assert [pool() for pool in pools] == [None]
    finally:
        gc.enable()
