"""Streams, cancellation and death, on a real engine with a small random model."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from model_folder import llama_config, save_small_model
from pageray.cluster.config import EngineConfig
from pageray.cluster.errors import ContextLengthError, EngineDeadError, InvalidParameterError
from pageray.cluster.generation import FinishReason, GenerateRequest, RequestOutput
from pageray.cluster.ids import RequestId
from pageray.cluster.sampling_params import SamplingParams
from pageray.workers.async_engine import AsyncEngine, merge_outputs
from pageray.workers.ranks.launcher import ChildProcessLauncher, RankProcess
from pageray.workers.ranks.messages import RankSpec


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small-llama")
    save_small_model(path, llama_config(max_position_embeddings=512))
    return path


def config_of(folder: Path, **settings: object) -> EngineConfig:
    return EngineConfig.from_mapping(
        {
            "model": str(folder),
            "device": "cpu",
            "block_size": 4,
            "num_gpu_blocks_override": 256,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 64,
            "cpu_threads_per_rank": 1,
            **settings,
        }
    )


@pytest.fixture
def engine(folder: Path) -> Iterator[AsyncEngine]:
    engine = AsyncEngine.start(config_of(folder))
    yield engine
    engine.shutdown()


def request_of(
    name: str, prompt: tuple[int, ...] = (1, 5, 9), **sampling: object
) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId(name),
        prompt_token_ids=prompt,
        sampling=SamplingParams(**{"ignore_eos": True, **sampling}),  # pyright: ignore[reportArgumentType]
    )


async def collect(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    return merge_outputs([output async for output in stream])


async def until(condition: Callable[[], bool], engine: AsyncEngine) -> None:
    """Wait for a condition that the engine brings about, looking once per engine turn."""
    async with asyncio.timeout(20):
        while not condition():
            await engine.stats()


async def held_blocks(engine: AsyncEngine) -> int:
    return (await engine.stats()).num_held_blocks


async def drained(engine: AsyncEngine) -> None:
    async with asyncio.timeout(20):
        while await held_blocks(engine) or (await engine.stats()).num_running:
            pass


def test_many_streams_at_once_equal_each_alone(engine: AsyncEngine) -> None:
    async def main() -> None:
        requests = [request_of(f"r{i}", (1, 2 + i, 7), max_tokens=20, seed=i) for i in range(12)]
        together = await asyncio.gather(*(collect(engine.generate(r)) for r in requests))
        for request, output in zip(requests, together, strict=True):
            assert output.is_finished
            assert output.sequences[0].finish_reason is FinishReason.LENGTH
            assert len(output.sequences[0].token_ids) == 20
            alone = await collect(engine.generate(request))
            assert alone.sequences == output.sequences
        await drained(engine)

    asyncio.run(main())


def test_closing_a_stream_aborts_its_request(engine: AsyncEngine) -> None:
    async def main() -> None:
        stream = engine.generate(request_of("a", n=4, max_tokens=200))
        await anext(stream)
        assert await held_blocks(engine) > 0
        await stream.aclose()
        await drained(engine)
        assert (await collect(engine.generate(request_of("a", max_tokens=2)))).is_finished

    asyncio.run(main())


def test_cancelling_the_consumer_aborts_its_request(engine: AsyncEngine) -> None:
    async def main() -> None:
        started = asyncio.Event()

        async def consume() -> None:
            async for _ in engine.generate(request_of("a", max_tokens=400)):
                started.set()

        task = asyncio.create_task(consume())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await drained(engine)

    asyncio.run(main())


def test_slow_consumer_gets_what_has_accumulated_at_once(engine: AsyncEngine) -> None:
    async def main() -> None:
        stream = engine.generate(request_of("a", max_tokens=30))
        first = await anext(stream)
        assert len(first.sequences[0].token_ids) < 30
        # Another request that takes longer: by then everything of the first is there.
        await collect(engine.generate(request_of("b", max_tokens=60)))
        rest = await anext(stream)
        assert rest.is_finished
        assert len(first.sequences[0].token_ids) + len(rest.sequences[0].token_ids) == 30

    asyncio.run(main())


def test_bad_requests_raise_and_the_next_one_is_served(engine: AsyncEngine) -> None:
    async def main() -> None:
        for bad, error in (
            (request_of("a", ()), InvalidParameterError),
            (request_of("a", (1, 101)), InvalidParameterError),
            (request_of("a", (1, -1)), InvalidParameterError),
            (request_of("a", temperature=-1.0), InvalidParameterError),
            (request_of("a", stop_token_ids=(101,)), InvalidParameterError),
            (request_of("a", n=17), InvalidParameterError),
            (request_of("a", max_tokens=510), ContextLengthError),
        ):
            with pytest.raises(error):
                await collect(engine.generate(bad))
        assert (await collect(engine.generate(request_of("a", max_tokens=2)))).is_finished

    asyncio.run(main())


def test_one_request_id_twice_at_once_is_refused(engine: AsyncEngine) -> None:
    async def main() -> None:
        stream = engine.generate(request_of("a", max_tokens=50))
        await anext(stream)
        with pytest.raises(InvalidParameterError, match="already being served"):
            await collect(engine.generate(request_of("a", max_tokens=2)))
        assert (await collect(stream)).is_finished

    asyncio.run(main())


def test_finishing_one_sequence_lets_its_siblings_go_on(engine: AsyncEngine) -> None:
    async def main() -> None:
        stream = engine.generate(request_of("a", n=3, max_tokens=60, seed=1))
        outputs = [await anext(stream)]
        engine.finish_sequence(RequestId("a"), 1)
        outputs += [output async for output in stream]
        lengths = {s.index: len(s.token_ids) for s in merge_outputs(outputs).sequences}
        assert lengths[0] == lengths[2] == 60
        assert lengths[1] < 60
        await drained(engine)

    asyncio.run(main())


def test_shutdown_ends_streams_with_an_error(folder: Path) -> None:
    engine = AsyncEngine.start(config_of(folder))

    async def main() -> None:
        stream = engine.generate(request_of("a", max_tokens=400))
        await anext(stream)
        engine.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            await collect(stream)
        with pytest.raises(EngineDeadError, match="shut down"):
            engine.check_health()

    asyncio.run(main())


class RecordingLauncher:
    """Remembers the processes that the real launcher started."""

    def __init__(self) -> None:
        self.processes: list[RankProcess] = []

    def launch(self, specs: list[RankSpec]) -> list[RankProcess]:
        self.processes = ChildProcessLauncher().launch(specs)
        return self.processes


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_rank_ends_the_streams_soon(folder: Path, victim: int) -> None:
    launcher = RecordingLauncher()
    engine = AsyncEngine.start(config_of(folder, tensor_parallel_size=2), launcher=launcher)

    async def main() -> None:
        stream = engine.generate(request_of("a", max_tokens=400))
        await anext(stream)
        os.kill(launcher.processes[victim].pid, signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(EngineDeadError, match="rank"):
            await collect(stream)
        assert time.monotonic() - killed < 10
        with pytest.raises(EngineDeadError):
            engine.check_health()

    asyncio.run(main())
    engine.shutdown()


def test_stopped_rank_is_noticed_by_lack_of_progress(folder: Path) -> None:
    launcher = RecordingLauncher()
    engine = AsyncEngine.start(
        config_of(folder, tensor_parallel_size=2, step_timeout_s=2.0), launcher=launcher
    )

    async def main() -> None:
        stream = engine.generate(request_of("a", max_tokens=400))
        await anext(stream)
        os.kill(launcher.processes[1].pid, signal.SIGSTOP)
        with pytest.raises(EngineDeadError):
            await collect(stream)

    asyncio.run(main())
    engine.shutdown()


def test_truncated_weights_fail_the_start_with_their_name(folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    weights = (folder / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(Exception, match=r"model\.safetensors"):
        AsyncEngine.start(config_of(tmp_path, tensor_parallel_size=2))
