"""An engine on a CUDA device: greedy tokens are those of transformers, with graphs and without."""

from pathlib import Path

import pytest
import torch

from model_folder import llama_config, qwen3_config, random_prompts, save_small_model
from pageray.cluster.config import EngineConfig
from pageray.cluster.generation import GenerateRequest
from pageray.cluster.ids import RequestId
from pageray.cluster.sampling_params import SamplingParams
from pageray.workers.engine import Engine
from transformers_peer import load_model

pytestmark = pytest.mark.gpu

NUM_TOKENS = 24
LENGTHS = (1, 5, 16, 17, 33, 64, 100, 3, 48, 47, 70)
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}

POOL_AND_RESERVE_BYTES = 3 << 30
"""Beside what others have taken of the device."""

Tokens = list[list[int]]


@pytest.fixture(params=["llama", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    make = llama_config if request.param == "llama" else qwen3_config
    save_small_model(tmp_path, make(**SIZES, num_hidden_layers=4, eos_token_id=None))
    return tmp_path


def run(folder: Path, **settings: object) -> Tokens:
    """One request more at every step, so that prefill and decode mix and batches grow and shrink."""
    config = EngineConfig.from_mapping(
        {
            "model": str(folder),
            "device": "cuda",
            "dtype": "float32",
            "num_gpu_blocks_override": 200,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 80,
            **settings,
        }
    )
    prompts = random_prompts(101, LENGTHS)
    waiting = [
        GenerateRequest(
            request_id=RequestId(str(number)),
            prompt_token_ids=tuple(ids),
            sampling=SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True),
        )
        for number, ids in enumerate(prompts)
    ]
    outputs: Tokens = [[] for _ in prompts]
    engine = Engine.start(config)
    try:
        while waiting or engine.has_requests:
            if waiting:
                engine.add(waiting.pop(0))
            for output in engine.step():
                for sequence in output.sequences:
                    outputs[int(output.request_id)] += sequence.token_ids
        return outputs
    finally:
        engine.shutdown()


def test_greedy_tokens_are_those_of_transformers_with_graphs_and_without(folder: Path) -> None:
    model = load_model(folder)
    expected = [model.generate_greedy(ids, NUM_TOKENS) for ids in random_prompts(101, LENGTHS)]
    assert run(folder, enforce_eager=True) == expected
    assert run(folder) == expected
    assert run(folder, cuda_graph_sizes=[3, 9]) == expected


def test_a_pool_sized_by_the_device_leaves_room_for_graphs(folder: Path) -> None:
    free, total = torch.cuda.mem_get_info()
    share = (total - free + POOL_AND_RESERVE_BYTES) / total
    tokens = run(folder, num_gpu_blocks_override=None, gpu_memory_utilization=share)
    assert tokens == run(folder)
    assert total - torch.cuda.mem_get_info()[0] < share * total
