"""Greedy tokens equal those of transformers' `generate` in float32.

32 varied prompts; TP 1, 2 and 3; batched and alone; several chunk sizes; cache cold and hot;
a pool too small for the batch.
"""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

import prompts
import transformers_peer
from pageray.cluster.config import EngineConfig
from pageray.cluster.generation import GenerateRequest
from pageray.cluster.ids import RequestId
from pageray.cluster.sampling_params import SamplingParams
from pageray.workers.engine import Engine

NUM_TOKENS = 16
POOL_BLOCKS = 700

Tokens = list[list[int]]


@pytest.fixture(scope="module")
def prompt_ids(smollm2_folder: Path) -> Tokens:
    tokenizer = transformers_peer.load_tokenizer(smollm2_folder)
    return prompts.encoded(tokenizer.encode_chat)


@pytest.fixture(scope="module")
def expected(smollm2_folder: Path, prompt_ids: Tokens) -> Tokens:
    """What transformers generates, one prompt at a time, EOS included."""
    model = transformers_peer.load_model(smollm2_folder)
    return [model.generate_greedy(ids, NUM_TOKENS) for ids in prompt_ids]


@contextmanager
def engine_of(folder: Path, **settings: object) -> Generator[Engine]:
    engine = Engine.start(
        EngineConfig.from_mapping(
            {
                "model": str(folder),
                "dtype": "float32",
                "device": "cpu",
                "max_num_seqs": 32,
                "num_gpu_blocks_override": POOL_BLOCKS,
                "cpu_threads_per_rank": 1 if settings.get("tensor_parallel_size", 1) != 1 else 2,
                **settings,
            }
        )
    )
    try:
        yield engine
    finally:
        engine.shutdown()


def run(engine: Engine, batch: Tokens, num_tokens: int = NUM_TOKENS) -> Tokens:
    """All prompts at once; checks the invariants after every step."""
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens)
    for position, ids in enumerate(batch):
        engine.add(
            GenerateRequest(
                request_id=RequestId(str(position)),
                prompt_token_ids=tuple(ids),
                sampling=sampling,
            )
        )
    outputs: Tokens = [[] for _ in batch]
    while engine.has_requests:
        for output in engine.step():
            for sequence in output.sequences:
                outputs[int(output.request_id)] += sequence.token_ids
        engine.check_invariants()
    return outputs


def cut(outputs: Tokens, num_tokens: int) -> Tokens:
    return [tokens[:num_tokens] for tokens in outputs]


@pytest.mark.parametrize("budget", [2048, 256, 50])
def test_batched_cold_and_hot_at_several_chunk_sizes(
    smollm2_folder: Path, prompt_ids: Tokens, expected: Tokens, budget: int
) -> None:
    with engine_of(smollm2_folder, max_num_batched_tokens=budget) as engine:
        assert run(engine, prompt_ids) == expected
        cold = engine.stats()
        assert run(engine, prompt_ids) == expected
        hot = engine.stats()
    hits = hot.prefix_hits_tokens - cold.prefix_hits_tokens
    assert hits == sum((len(ids) - 1) // 16 * 16 for ids in prompt_ids)
    # What is not hit is computed once; the last output token never is.
    num_rest = sum(
        len(ids) + len(tokens) - 1 for ids, tokens in zip(prompt_ids, expected, strict=True)
    )
    assert hot.num_computed_tokens - cold.num_computed_tokens == num_rest - hits


def test_alone(smollm2_folder: Path, prompt_ids: Tokens, expected: Tokens) -> None:
    with engine_of(smollm2_folder, enable_prefix_caching=False) as engine:
        for ids, tokens in zip(prompt_ids, expected, strict=True):
            assert run(engine, [ids]) == [tokens]


@pytest.mark.parametrize("block_size", [1, 5, 64])
def test_other_block_sizes(
    smollm2_folder: Path, prompt_ids: Tokens, expected: Tokens, block_size: int
) -> None:
    chosen = [0, 7, 18, 22, 27]
    with engine_of(
        smollm2_folder,
        block_size=block_size,
        num_gpu_blocks_override=4096 // block_size,
        max_num_batched_tokens=64,
    ) as engine:
        outputs = run(engine, [prompt_ids[i] for i in chosen], 12)
    assert outputs == cut([expected[i] for i in chosen], 12)


def test_pool_of_a_third_of_the_demand(
    smollm2_folder: Path, prompt_ids: Tokens, expected: Tokens
) -> None:
    demand = sum(-(-(len(ids) + NUM_TOKENS - 1) // 16) for ids in prompt_ids)
    with engine_of(smollm2_folder, num_gpu_blocks_override=demand // 3) as engine:
        assert run(engine, prompt_ids) == expected
        assert engine.stats().num_preemptions > 0
        assert engine.stats().num_held_blocks == 0


@pytest.mark.parametrize("size", [2, 3])
def test_tensor_parallel_batched_cold_and_hot_then_alone(
    smollm2_folder: Path, prompt_ids: Tokens, expected: Tokens, size: int
) -> None:
    with engine_of(smollm2_folder, tensor_parallel_size=size, max_num_batched_tokens=300) as engine:
        assert run(engine, prompt_ids) == expected
        assert run(engine, prompt_ids) == expected
        for position in (1, 10, 17, 23):
            assert run(engine, [prompt_ids[position]]) == [expected[position]]


def test_int8_weights_keep_most_next_tokens(
    smollm2_folder: Path, prompt_ids: Tokens, expected: Tokens
) -> None:
    """Of each prompt and what follows it in float32, the next token at four places."""
    asked = [
        (ids + tokens[:num_given], tokens[num_given])
        for ids, tokens in zip(prompt_ids, expected, strict=True)
        for num_given in (0, 4, 8, 12)
        if num_given < len(tokens)
    ]
    with engine_of(smollm2_folder, quantization="int8") as engine:
        outputs = run(engine, [ids for ids, _ in asked], 1)
    same = sum(tokens == [token] for tokens, (_, token) in zip(outputs, asked, strict=True))
    print(f"{same} of {len(asked)} next tokens are those of float32")
    assert 0.9 * len(asked) <= same < len(asked), "rounding shows, but rarely"
