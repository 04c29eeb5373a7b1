"""A prefix computed by one engine is used by another, in another process, with other ranks."""

from collections.abc import Generator
from pathlib import Path

import pytest

from engine_process import EngineProcess
from pageray.workers.page_service.messages import TransportName

BLOCK_SIZE = 16
PROMPT = [(7 * position) % 400 + 100 for position in range(5 * BLOCK_SIZE + 3)]
NUM_TOKENS = 6
BLOCK_BYTES = 30 * 2 * 3 * BLOCK_SIZE * 64 * 4
"""30 layers, K and V, 3 KV heads, 64 numbers of 4 bytes per head and token."""


@pytest.fixture(scope="module")
def engines(smollm2_folder: Path) -> Generator[dict[str, EngineProcess]]:
    """Sources with 1, 2 and 3 ranks, destinations with 1 and 2; all of the same model."""
    degrees = {"from-1": 1, "from-2": 2, "from-3": 3, "to-1": 1, "to-2": 2}
    started = {
        name: EngineProcess(
            name,
            model=str(smollm2_folder),
            device="cpu",
            dtype="float32",
            tensor_parallel_size=degree,
            cpu_threads_per_rank=1,
            num_gpu_blocks_override=64,
            max_num_batched_tokens=256,
        )
        for name, degree in degrees.items()
    }
    try:
        for engine in started.values():
            engine.wait_until_ready()
        yield started
    finally:
        for engine in started.values():
            engine.stop()


@pytest.fixture(scope="module")
def cold_tokens(engines: dict[str, EngineProcess]) -> list[int]:
    """What the prompt gives where nothing was cached; asserted to be the same on every source."""
    answers = [
        engine.generate(PROMPT, NUM_TOKENS)
        for name, engine in engines.items()
        if name.startswith("from")
    ]
    assert answers[0] == answers[1] == answers[2]
    return answers[0]


@pytest.mark.parametrize("transport", ["shared_memory", "sockets", "grpc"])
@pytest.mark.parametrize(
    ("source", "destination"),
    [("from-1", "to-1"), ("from-2", "to-1"), ("from-1", "to-2"), ("from-3", "to-2")],
)
def test_only_the_tail_is_computed_after_a_pull(
    engines: dict[str, EngineProcess],
    cold_tokens: list[int],
    source: str,
    destination: str,
    transport: TransportName,
) -> None:
    puller = engines[destination]
    puller.clear_cache()
    num_free = puller.num_free_blocks()
    computed_before = puller.stats().num_computed_tokens

    outcome = puller.pull(PROMPT, engines[source].info(), transport)

    assert outcome.failure is None
    assert outcome.num_blocks == 5
    assert outcome.num_bytes == 5 * BLOCK_BYTES
    assert puller.num_free_blocks() == num_free
    assert puller.generate(PROMPT, NUM_TOKENS) == cold_tokens
    computed = puller.stats().num_computed_tokens - computed_before
    assert computed == (len(PROMPT) - 5 * BLOCK_SIZE) + (NUM_TOKENS - 1)
    assert puller.num_free_blocks() == num_free
    assert engines[source].stats().num_held_blocks == 0


def test_what_is_here_is_not_pulled_again(
    engines: dict[str, EngineProcess], cold_tokens: list[int]
) -> None:
    puller = engines["to-1"]
    puller.clear_cache()
    puller.generate(PROMPT[: 2 * BLOCK_SIZE + 1], 1)
    outcome = puller.pull(PROMPT, engines["from-1"].info(), "shared_memory")
    assert outcome.num_blocks == 3
    assert puller.pull(PROMPT, engines["from-1"].info(), "shared_memory").num_blocks == 0
    assert puller.generate(PROMPT, NUM_TOKENS) == cold_tokens


def test_a_holder_that_has_nothing_gives_nothing(engines: dict[str, EngineProcess]) -> None:
    unknown = [5] * 40
    num_free = engines["to-1"].num_free_blocks()
    outcome = engines["to-1"].pull(unknown, engines["from-1"].info(), "sockets")
    assert (outcome.num_blocks, outcome.failure) == (0, None)
    assert engines["to-1"].num_free_blocks() == num_free


@pytest.mark.parametrize(
    ("source", "transport"), [("from-1", "sockets"), ("from-3", "shared_memory")]
)
def test_pages_are_right_while_they_are_being_computed(
    engines: dict[str, EngineProcess],
    cold_tokens: list[int],
    source: str,
    transport: TransportName,
) -> None:
    """Layer by layer, out of ranks that are not equally far."""
    holder, puller = engines[source], engines["to-2"]
    holder.clear_cache()
    puller.clear_cache()
    computed_before = puller.stats().num_computed_tokens

    outcome = puller.pull(PROMPT, holder.info(), transport, compute=True)

    assert outcome.failure is None
    assert (outcome.num_blocks, outcome.num_computed_blocks) == (5, 5)
    assert puller.generate(PROMPT, NUM_TOKENS) == cold_tokens
    computed = puller.stats().num_computed_tokens - computed_before
    assert computed == (len(PROMPT) - 5 * BLOCK_SIZE) + (NUM_TOKENS - 1)
