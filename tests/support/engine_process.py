"""A whole engine with its page service in a process of its own, steered through a pipe."""

import multiprocessing
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import cast

import msgspec

from pageray.cluster.config import EngineConfig
from pageray.cluster.coordinator.messages import EngineInfo
from pageray.cluster.generation import GenerateRequest
from pageray.cluster.ids import EngineId, Epoch, RequestId
from pageray.cluster.sampling_params import SamplingParams
from pageray.workers.engine import Engine, EngineStats
from pageray.workers.page_service.messages import TransportName
from pageray.workers.page_service.page_agent import PageAgent
from pageray.workers.page_service.puller import PullOutcome

SECRET = b"the secret of these tests"

Command = Callable[["EngineHost"], object]


@dataclass
class EngineHost:
    """What a command may touch, inside the engine's process."""

    engine: Engine
    agent: PageAgent


def greedy(prompt: list[int], num_tokens: int) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId("r"),
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True),
    )


class EngineProcess:
    """Started at once; `wait_until_ready` before the first command."""

    def __init__(self, name: str, **settings: object) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        # Not a daemon: it has children of its own, its ranks.
        self._process = context.Process(target=_main, args=(theirs, name, settings), name=name)
        self._process.start()
        theirs.close()

    def wait_until_ready(self) -> None:
        self._answer()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def generate(self, prompt: list[int], num_tokens: int = 8) -> list[int]:
        return cast("list[int]", self._ask("generate", prompt, num_tokens))

    def info(self) -> EngineInfo:
        return msgspec.msgpack.decode(cast("bytes", self._ask("info")), type=EngineInfo)

    def stats(self) -> EngineStats:
        return cast("EngineStats", self._ask("stats"))

    def pull(
        self,
        prompt: list[int],
        source: EngineInfo,
        transport: TransportName,
        *,
        compute: bool = False,
    ) -> PullOutcome:
        """Pull what `source` has of the prompt, over one transport; with `compute` it computes
        what it has not."""
        data = msgspec.msgpack.encode(source)
        return cast("PullOutcome", self._ask("pull", prompt, data, transport, compute))

    def clear_cache(self) -> None:
        self._ask("clear_cache")

    def num_free_blocks(self) -> int:
        stats = self.stats()
        return stats.num_blocks - stats.num_held_blocks

    def stop(self) -> None:
        if self._process.is_alive():
            self._pipe.send(("stop",))
            self._process.join(20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _ask(self, *command: object) -> object:
        self._pipe.send(command)
        return self._answer()

    def _answer(self) -> object:
        is_error, answer = self._pipe.recv()
        if is_error:
            raise AssertionError(answer)
        return answer


class _Job:
    """A prefill that a thread of its own steps to its end."""

    def __init__(self, engine: Engine, request: GenerateRequest) -> None:
        self.request_id = request.request_id
        self.is_over = False
        self.num_cached_tokens = 0
        engine.add(request)
        self._engine = engine
        threading.Thread(target=self._run, daemon=True).start()

    def cancel(self) -> None:
        """It ends by itself."""

    def _run(self) -> None:
        while self._engine.has_requests:
            for output in self._engine.step():
                self.num_cached_tokens = output.num_cached_tokens
        self.is_over = True


class _Prefills:
    """The engine does nothing else meanwhile: a test asks for one thing at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def start_prefill(self, request: GenerateRequest) -> _Job:
        return _Job(
            self._engine,
            GenerateRequest(
                request_id=RequestId("prefill"),
                prompt_token_ids=request.prompt_token_ids,
                sampling=SamplingParams(temperature=0.0, max_tokens=1),
            ),
        )


def _main(pipe: Connection, name: str, settings: dict[str, object]) -> None:
    engine = Engine.start(EngineConfig.from_mapping(settings))
    agent = PageAgent(
        engine,
        engine_id=EngineId(name),
        epoch=Epoch(1),
        secret=SECRET,
        prefills=_Prefills(engine),
    )
    host = EngineHost(engine, agent)
    pipe.send((False, None))
    try:
        while (command := pipe.recv()) != ("stop",):
            try:
                pipe.send((False, _run(host, *command)))
            except Exception:  # noqa: BLE001  # the test gets the traceback
                pipe.send((True, traceback.format_exc()))
    except EOFError:
        pass  # the test is gone
    finally:
        agent.close()
        engine.shutdown()


def _run(host: EngineHost, name: str, *arguments: object) -> object:
    engine = host.engine
    match name:
        case "generate":
            return _generate(engine, *arguments)  # type: ignore[arg-type]
        case "info":
            return msgspec.msgpack.encode(host.agent.info)
        case "stats":
            engine.check_invariants()
            return engine.stats()
        case "clear_cache":
            return engine.clear_prefix_cache()
        case "pull":
            return _pull(host, *arguments)  # type: ignore[arg-type]
        case _:
            raise ValueError(name)


def _generate(engine: Engine, prompt: list[int], num_tokens: int) -> list[int]:
    engine.add(greedy(prompt, num_tokens))
    tokens: list[int] = []
    while engine.has_requests:
        for output in engine.step():
            tokens += output.sequences[0].token_ids
    engine.check_invariants()
    return tokens


def _pull(
    host: EngineHost, prompt: list[int], source: bytes, transport: TransportName, compute: bool
) -> PullOutcome:
    request = greedy(prompt, 1)
    return host.agent.pull(
        host.engine.pages.contents_of(request),
        msgspec.msgpack.decode(source, type=EngineInfo),
        timeout_s=60.0,
        transport=transport,
        compute=request if compute else None,
    )
