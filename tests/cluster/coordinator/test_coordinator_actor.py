"""The coordinator as an actor, in a Ray cluster of one node."""

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar, cast

import pytest
import ray
from ray.actor import ActorHandle

from pageray.cluster.coordinator.coordinator_actor import NAMESPACE, coordinator_name
from pageray.cluster.coordinator.coordinator_client import CoordinatorClient
from pageray.cluster.coordinator.errors import CoordinatorUnavailableError
from pageray.cluster.coordinator.messages import (
    BlocksStored,
    Endpoint,
    EngineInfo,
    EngineLoad,
    EngineReply,
    EventBatch,
    Heartbeat,
    Snapshot,
)
from pageray.cluster.ids import BlockKey, EngineId, Epoch
from pageray.cluster.page_layout import PoolLayout

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]

ROOT = BlockKey(b"r" * 32)
KEYS = tuple(BlockKey(random.Random(number).randbytes(32)) for number in range(20))
EPOCH = Epoch(1)
BOUND_S = 60.0
"""Within this time what must happen has happened, also on a busy machine."""


T = TypeVar("T")


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def test_engines_and_routers_speak_to_one_coordinator() -> None:
    async def main() -> None:
        engine, router = CoordinatorClient("one"), CoordinatorClient("one")
        secret = await engine.secret()
        assert len(secret) == 32
        assert await router.secret() == secret
        assert await CoordinatorClient("another").secret() != secret
        for engine_id in (EngineId("a"), EngineId("b")):
            assert (await engine.register(info_of(engine_id))).must_send_snapshot
            assert await engine.restore(snapshot_of(engine_id, 0, 0)) == EngineReply()
            stored = (BlocksStored(keys=KEYS[:5]),)
            batch = EventBatch(engine_id=engine_id, epoch=EPOCH, sequence_number=1, events=stored)
            assert await engine.apply(batch) == EngineReply()
            assert await engine.heartbeat(heartbeat_of(engine_id, 1)) == EngineReply()
        location = await router.locate(ROOT, KEYS)
        assert [(view.info.engine_id, view.num_matched_blocks) for view in location.engines] == [
            ("a", 5),
            ("b", 5),
        ]
        assert location.engines[0].info == info_of(EngineId("a"))
        holder = await engine.best_holder(ROOT, KEYS, min_blocks=1, exclude=EngineId("a"))
        assert holder is not None
        assert (holder.info.engine_id, holder.num_matched_blocks) == ("b", 5)
        await engine.end_lease(holder.lease_id)
        assert await engine.best_holder(ROOT, KEYS, min_blocks=6, exclude=EngineId("a")) is None
        await engine.deregister(EngineId("b"), EPOCH)
        assert len((await router.locate(ROOT, KEYS)).engines) == 1

    asyncio.run(main())


def test_killed_it_comes_back_empty_with_the_same_secret_and_learns_again() -> None:
    async def main() -> None:
        client = CoordinatorClient("killed")
        secret = await client.secret()
        await client.register(info_of(EngineId("a")))
        await client.restore(snapshot_of(EngineId("a"), 7, 9))
        pid = await process_id("killed")
        os.kill(pid, signal.SIGKILL)
        reply = await until_answered(lambda: client.heartbeat(heartbeat_of(EngineId("a"), 7)))
        assert reply.must_register
        assert await process_id("killed") != pid
        assert await CoordinatorClient("killed").secret() == secret
        assert (await client.locate(ROOT, KEYS)).engines == ()
        assert (await client.register(info_of(EngineId("a")))).must_send_snapshot
        assert await client.restore(snapshot_of(EngineId("a"), 7, 9)) == EngineReply()
        assert (await client.locate(ROOT, KEYS)).engines[0].num_matched_blocks == 9

    asyncio.run(main())


def test_it_ends_when_no_engine_speaks_and_is_started_again_when_one_does() -> None:
    async def main() -> None:
        client = CoordinatorClient("idle", idle_timeout_s=2.0)
        secret = await client.secret()
        pid = await process_id("idle")
        deadline_s = time.monotonic() + BOUND_S
        # Only what engines say keeps it alive.
        while is_named("idle"):
            assert time.monotonic() < deadline_s, "it did not end"
            await asyncio.sleep(0.2)
        reply = await until_answered(lambda: client.heartbeat(heartbeat_of(EngineId("a"), 0)))
        assert reply.must_register
        assert await process_id("idle") != pid
        # The client that started it again knew the secret.
        assert await CoordinatorClient("idle").secret() == secret

    asyncio.run(main())


def test_no_answer_is_one_error() -> None:
    async def main() -> None:
        client = CoordinatorClient("stopped", timeout_s=0.5)
        await client.secret()
        pid = await process_id("stopped")
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(CoordinatorUnavailableError, match=r"'stopped' gave no answer"):
                await client.locate(ROOT, KEYS)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert (await until_answered(lambda: client.locate(ROOT, KEYS))).engines == ()

    asyncio.run(main())


def info_of(engine_id: EngineId) -> EngineInfo:
    return EngineInfo(
        engine_id=engine_id,
        epoch=EPOCH,
        root_key=ROOT,
        block_size=16,
        num_blocks=100,
        layout=PoolLayout(
            num_layers=2, block_size=16, head_dim=8, element_bytes=2, shards=((0, 2),)
        ),
        endpoint=Endpoint(control_address="h:1", data_address="h:2", host_id="h", pid=1),
    )


def snapshot_of(engine_id: EngineId, number: int, num_keys: int) -> Snapshot:
    return Snapshot(engine_id=engine_id, epoch=EPOCH, sequence_number=number, keys=KEYS[:num_keys])


def heartbeat_of(engine_id: EngineId, number: int) -> Heartbeat:
    return Heartbeat(
        engine_id=engine_id, epoch=EPOCH, load=EngineLoad(num_running=1), sequence_number=number
    )


async def until_answered(ask: Callable[[], Awaitable[T]]) -> T:
    deadline_s = time.monotonic() + BOUND_S
    while True:
        try:
            return await ask()
        except CoordinatorUnavailableError:
            assert time.monotonic() < deadline_s, "it did not come back"
            await asyncio.sleep(0.1)


async def process_id(app_name: str) -> int:
    actor = cast(
        "ActorHandle[object]", ray.get_actor(coordinator_name(app_name), namespace=NAMESPACE)
    )
    method = cast("Callable[[], Awaitable[int]]", actor.process_id.remote)
    async with asyncio.timeout(BOUND_S):
        return await method()


def is_named(app_name: str) -> bool:
    try:
        ray.get_actor(coordinator_name(app_name), namespace=NAMESPACE)
    except ValueError:
        return False
    return True
