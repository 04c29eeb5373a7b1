"""Pulls that are aborted, delayed, cut, reordered and corrupted, on pools that are too small.

The engines' ranks compare every token slot they read (`fake_engine`), so a late write into a
block that had been given to somebody else fails the step that reads it.
"""

import random
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from engine_process import SECRET, greedy
from fake_engine import fake_engine
from fake_ranks import EOS, continue_alone
from pageray.cluster.admission import request_seed
from pageray.cluster.generation import GenerateRequest
from pageray.cluster.ids import EngineId, Epoch, RequestId, TransferId
from pageray.workers.engine import Engine
from pageray.workers.page_service.messages import PushRequest, TransportName
from pageray.workers.page_service.page_agent import PageAgent
from pageray.workers.page_service.puller import PullCancel, PullOutcome
from pageray.workers.transfer.page_write import PageWrite
from pageray.workers.transfer.page_writer import PageWriter, ShouldStop, TransferError, never

DEADLINE_S = 1.0
MAX_PULLS = 5_000
"""Far more than are needed; see `has_seen_enough`."""


class FaultyWriter:
    """Writes late, in another order, twice, or not to the end; each seeded."""

    def __init__(self, inner: PageWriter, rng: random.Random) -> None:
        self._inner = inner
        self._rng = rng

    def write(
        self, transfer_id: TransferId, writes: Sequence[PageWrite], should_stop: ShouldStop = never
    ) -> list[int]:
        fault = self._rng.random()
        order = list(range(len(writes)))
        self._rng.shuffle(order)
        checksums: dict[int, int] = {}
        for number, position in enumerate(order):
            if self._rng.random() < 0.1:
                # Longer than some destinations are willing to wait, and deaf to a stop.
                time.sleep(self._rng.random() * 0.1)
            if fault < 0.2 and number == len(order) // 2:
                raise TransferError("cut in the middle")
            for _ in range(1 + (fault > 0.8)):
                checksums[position] = self._inner.write(transfer_id, [writes[position]], never)[0]
        if 0.2 < fault < 0.3:
            checksums[order[0]] ^= 1
        return [checksums[position] for position in range(len(writes))]

    def close(self) -> None:
        self._inner.close()


class FaultyAgent(PageAgent):
    rng = random.Random(0)

    def _open_writer(self, request: PushRequest) -> PageWriter:
        return FaultyWriter(super()._open_writer(request), random.Random(self.rng.random()))


class Runner:
    """Steps an engine in a thread for as long as the context lasts; a failed step is raised."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.outputs: dict[RequestId, list[int]] = {}
        self._failure: BaseException | None = None
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Runner":
        self._thread.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._is_stopping.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def finish(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self.engine.has_requests:
            assert self._failure is None, self._failure
            assert time.monotonic() < deadline, "requests are left"
            time.sleep(0.002)

    def _run(self) -> None:
        try:
            while not self._is_stopping.is_set():
                outputs = self.engine.step()
                self.engine.check_invariants()
                for output in outputs:
                    self.outputs.setdefault(output.request_id, []).extend(
                        output.sequences[0].token_ids
                    )
                if not outputs:
                    time.sleep(0.0005)
        except BaseException as error:  # noqa: BLE001  # raised where the runner is left
            self._failure = error


@contextmanager
def agents_of(engines: Sequence[Engine]) -> Generator[list[PageAgent]]:
    agents: list[PageAgent] = [
        FaultyAgent(engine, engine_id=EngineId(f"e{i}"), epoch=Epoch(1), secret=SECRET)
        for i, engine in enumerate(engines)
    ]
    try:
        yield agents
    finally:
        for agent in agents:
            agent.close()
        for engine in engines:
            engine.shutdown()


def wait_for(is_true: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def prompts(rng: random.Random, count: int) -> list[list[int]]:
    """Few beginnings, many ends: most prompts share blocks with others."""
    beginnings = [[rng.randrange(EOS) for _ in range(32)] for _ in range(4)]
    return [
        rng.choice(beginnings)[: rng.randrange(8, 33)]
        + [rng.randrange(EOS) for _ in range(rng.randrange(1, 12))]
        for _ in range(count)
    ]


@pytest.mark.parametrize("transport", ["shared_memory", "sockets", "grpc"])
def test_hundreds_of_broken_pulls_harm_nobody(transport: TransportName) -> None:
    rng = random.Random(f"pulls over {transport}")
    # Room for some two sequences and their pulls: blocks change hands all the time.
    engines = [
        fake_engine(num_blocks=40, before_layer=lambda: time.sleep(0.0003)) for _ in range(2)
    ]
    outcomes: list[PullOutcome] = []
    requests: list[tuple[int, GenerateRequest]] = []

    with agents_of(engines) as agents, Runner(engines[0]) as first, Runner(engines[1]) as second:
        runners = (first, second)

        def pull(number: int, prompt: list[int], patience_s: float) -> PullOutcome:
            puller = number % 2
            cancel = PullCancel()
            timer = threading.Timer(patience_s, cancel.set)
            timer.start()
            started_s = time.monotonic()
            contents = engines[puller].pages.contents_of(greedy(prompt, 1))
            outcome = agents[puller].pull(
                contents,
                agents[1 - puller].info,
                timeout_s=DEADLINE_S,
                cancel=cancel,
                transport=transport,
            )
            timer.cancel()
            assert time.monotonic() - started_s < DEADLINE_S + 1.0
            return outcome

        with ThreadPoolExecutor(6) as executor:
            futures: list[Future[PullOutcome]] = []
            for number, prompt in enumerate(prompts(rng, MAX_PULLS)):
                request = GenerateRequest(
                    request_id=RequestId(str(number)),
                    prompt_token_ids=tuple(prompt),
                    sampling=greedy(prompt, 6).sampling,
                )
                place = rng.randrange(2)
                requests.append((place, request))
                runners[place].engine.add(request)
                futures.append(executor.submit(pull, number, prompt, rng.random() * 0.1))
                wait_for(
                    lambda place=place: engines[place].stats().num_waiting < 6, 20, "no progress"
                )
                if number % 50 == 0 and has_seen_enough([f.result() for f in futures]):
                    break
            outcomes = [future.result() for future in futures]
        for runner in runners:
            runner.finish(timeout_s=30)
        for engine in engines:
            wait_for(lambda engine=engine: engine.stats().num_held_blocks == 0, 10, "blocks held")
            engine.check_invariants()

    for place, request in requests:
        expected = continue_alone(list(request.prompt_token_ids), request_seed(request, 0), 0, 6)
        # ignore_eos: `continue_alone` stops at one, the engine does not.
        assert runners[place].outputs[request.request_id][: len(expected)] == expected
    assert has_seen_enough(outcomes), f"{len(outcomes)} pulls were too harmless"


def has_seen_enough(outcomes: Sequence[PullOutcome]) -> bool:
    """A hundred broken pulls (over each transport), and not because none can succeed."""
    num_failed = sum(outcome.failure is not None for outcome in outcomes)
    num_delivered = sum(outcome.num_blocks > 0 for outcome in outcomes)
    return num_failed >= 100 and num_delivered >= 10
