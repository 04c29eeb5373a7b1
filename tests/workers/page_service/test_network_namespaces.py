"""Pages between two network namespaces: nothing but the network connects the two engines."""

import itertools
import multiprocessing
import os
import shutil
import subprocess
from collections.abc import Generator
from dataclasses import dataclass

import msgspec
import pytest

from engine_process import SECRET, greedy
from fake_engine import BLOCK_SIZE, fake_engine
from namespace_jobs import serve_in_namespace
from pageray.cluster.coordinator.messages import EngineInfo
from pageray.cluster.ids import EngineId, Epoch
from pageray.workers.page_service.messages import TransportName
from pageray.workers.page_service.page_agent import PageAgent

NUM_BLOCKS = 9
PROMPT = [(5 * position) % 90 for position in range(NUM_BLOCKS * BLOCK_SIZE + 1)]
HERE, THERE = "10.231.77.1", "10.231.77.2"
BOUND_S = 30.0

epochs = itertools.count(1)


@dataclass
class Link:
    """A cable between this namespace and that of process `pid`."""

    name: str
    pid: int

    def __enter__(self) -> "Link":
        near, far = f"{self.name}n", f"{self.name}f"
        _ip("link", "add", near, "type", "veth", "peer", "name", far)
        _ip("link", "set", far, "netns", str(self.pid))
        _ip("addr", "add", f"{HERE}/24", "dev", near)
        _ip("link", "set", near, "up")
        inside = ["nsenter", "-t", str(self.pid), "-n"]
        _run([*inside, "ip", "addr", "add", f"{THERE}/24", "dev", far])
        _run([*inside, "ip", "link", "set", far, "up"])
        return self

    def __exit__(self, *details: object) -> None:
        # The other end goes with it; both may be gone with the process.
        subprocess.run(["ip", "link", "del", f"{self.name}n"], check=False, capture_output=True)


@pytest.fixture(scope="module")
def far_engine() -> Generator[EngineInfo]:
    """An engine in another namespace that holds the prompt's pages."""
    for tool in ("ip", "nsenter"):
        if shutil.which(tool) is None:
            pytest.skip(f"there is no `{tool}` here")
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=serve_in_namespace, args=(theirs, THERE, PROMPT))
    process.start()
    try:
        assert pipe.poll(BOUND_S)
        if not pipe.recv():
            pytest.skip("this user may not make a network namespace")
        assert process.pid is not None
        try:
            link = Link(f"pr{os.getpid() % 100_000}", process.pid).__enter__()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no veth pair can be made here: {error.stderr.decode()}")
        try:
            pipe.send("up")
            assert pipe.poll(BOUND_S)
            yield msgspec.msgpack.decode(pipe.recv(), type=EngineInfo)
            pipe.send("stop")
            process.join(BOUND_S)
        finally:
            link.__exit__()
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize("transport", ["sockets", "grpc"])
def test_pages_cross_the_network(far_engine: EngineInfo, transport: TransportName) -> None:
    engine = fake_engine(64)
    agent = PageAgent(
        engine, engine_id=EngineId("near"), epoch=Epoch(next(epochs)), secret=SECRET, host=HERE
    )
    try:
        request = greedy(PROMPT, 3)
        contents = engine.pages.contents_of(request)
        outcome = agent.pull(contents, far_engine, timeout_s=BOUND_S, transport=transport)
        assert outcome.failure is None
        assert outcome.num_blocks == NUM_BLOCKS
        engine.add(request)
        while engine.has_requests:
            # The ranks compare every slot they read.
            engine.step()
        assert engine.stats().num_computed_tokens == 1 + 2
    finally:
        agent.close()
        engine.shutdown()


def test_another_machine_is_never_written_to_through_memory(far_engine: EngineInfo) -> None:
    engine = fake_engine(64)
    agent = PageAgent(
        engine, engine_id=EngineId("near"), epoch=Epoch(next(epochs)), secret=SECRET, host=HERE
    )
    try:
        contents = engine.pages.contents_of(greedy(PROMPT, 3))
        outcome = agent.pull(contents, far_engine, timeout_s=BOUND_S)
        assert (outcome.failure, outcome.num_blocks) == (None, NUM_BLOCKS)
    finally:
        agent.close()
        engine.shutdown()


def _ip(*arguments: str) -> None:
    _run(["ip", *arguments])


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True)
