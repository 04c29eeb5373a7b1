"""An engine in a network namespace of its own: to it, the test is another machine."""

import ctypes
from multiprocessing.connection import Connection

import msgspec

from engine_process import SECRET, greedy
from fake_engine import fake_engine
from pageray.cluster.ids import EngineId, Epoch
from pageray.workers.page_service.page_agent import PageAgent

_CLONE_NEWNET = 0x40000000


def serve_in_namespace(pipe: Connection, address: str, prompt: list[int]) -> None:
    """Says whether it could leave; is told when its interface is up; then holds `prompt`'s pages
    and says where, until it is told to stop."""
    has_left = ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET) == 0
    pipe.send(has_left)
    if not has_left or pipe.recv() != "up":
        return
    engine = fake_engine(64)
    engine.add(greedy(prompt, 1))
    while engine.has_requests:
        engine.step()
    agent = PageAgent(
        engine,
        engine_id=EngineId("far"),
        epoch=Epoch(1),
        secret=SECRET,
        host=address,
        memory_id="another machine",
    )
    pipe.send(msgspec.msgpack.encode(agent.info))
    pipe.recv()
    agent.close()
    engine.shutdown()
