"""Whatever a bad network did, afterwards the coordinator knows what the engines hold.

Messages and replies are lost, late, repeated and reordered; engines restart, leave and crash; the
coordinator restarts empty. Then the network turns reliable.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from pageray.cluster.coordinator.block_table import hint_of
from pageray.cluster.coordinator.coordinator import Coordinator
from pageray.cluster.coordinator.messages import (
    BlockEvent,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    EngineInfo,
    EngineLoad,
    EngineReply,
    EventBatch,
    Heartbeat,
    Snapshot,
)
from pageray.cluster.ids import BlockKey, EngineId, Epoch
from pageray.cluster.page_layout import PoolLayout

ROOT = BlockKey(b"r" * 32)
KEYS = [BlockKey(random.Random(number).randbytes(32)) for number in range(40)]
FIRST = Epoch(1)
TIMEOUT_S = 20.0

Message = EngineInfo | EventBatch | Snapshot | Heartbeat


@dataclass
class Engine:
    """The truth about one engine, and what it has to say."""

    engine_id: EngineId
    epoch: Epoch = FIRST
    number: int = 0
    keys: set[BlockKey] = field(default_factory=set[BlockKey])

    def info(self) -> EngineInfo:
        layout = PoolLayout(
            num_layers=1, block_size=4, head_dim=1, element_bytes=2, shards=((0, 1),)
        )
        return EngineInfo(
            engine_id=self.engine_id,
            epoch=self.epoch,
            root_key=ROOT,
            block_size=4,
            num_blocks=40,
            layout=layout,
        )

    def restart(self) -> None:
        self.epoch = Epoch(self.epoch + 1)
        self.number = 0
        self.keys.clear()

    def work(self, rng: random.Random) -> EventBatch:
        """One batch of changes."""
        events: list[BlockEvent] = []
        for _ in range(rng.randrange(1, 4)):
            some = tuple(rng.sample(KEYS, rng.randrange(1, 6)))
            kind = rng.random()
            if kind < 0.6:
                self.keys.update(some)
                events.append(BlocksStored(keys=some))
            elif kind < 0.95:
                self.keys.difference_update(some)
                events.append(BlocksRemoved(keys=some))
            else:
                self.keys.clear()
                events.append(CacheCleared())
        self.number += 1
        return EventBatch(
            engine_id=self.engine_id,
            epoch=self.epoch,
            sequence_number=self.number,
            events=tuple(events),
        )

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(
            engine_id=self.engine_id,
            epoch=self.epoch,
            load=EngineLoad(),
            sequence_number=self.number,
        )

    def answer(self, reply: EngineReply, epoch: Epoch) -> list[Message]:
        """What it sends because of a reply to something it said in `epoch`."""
        if epoch != self.epoch:
            return []
        assert not reply.is_stale, "the newest epoch was called stale"
        if reply.must_register:
            return [self.info()]
        if reply.must_send_snapshot:
            return [
                Snapshot(
                    engine_id=self.engine_id,
                    epoch=self.epoch,
                    sequence_number=self.number,
                    keys=tuple(self.keys),
                )
            ]
        return []


class Cluster:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.coordinator = Coordinator(heartbeat_timeout_s=TIMEOUT_S)
        self.engines = {
            engine_id: Engine(engine_id) for engine_id in map(EngineId, ("a", "b", "c"))
        }
        self.num_born = len(self.engines)
        # Messages to the coordinator, and replies with the engine and epoch that they are for.
        self.messages: list[Message] = [engine.info() for engine in self.engines.values()]
        self.replies: list[tuple[EngineReply, EngineId, Epoch]] = []

    def deliver(self, message: Message) -> EngineReply:
        match message:
            case EngineInfo():
                return self.coordinator.register(message, self.now_s)
            case EventBatch():
                return self.coordinator.apply(message)
            case Snapshot():
                return self.coordinator.restore(message)
            case Heartbeat():
                return self.coordinator.heartbeat(message, self.now_s)

    def step(self) -> None:
        """One thing happens, most often a message."""
        self.now_s += 0.1
        actions: list[tuple[float, Callable[[], None]]] = [
            (8, self.a_message_arrives),
            (6, self.a_reply_arrives),
            (5, self.an_engine_works),
            (3, self.an_engine_beats),
            (0.15, self.an_engine_restarts),
            (0.1, self.an_engine_leaves),
            (0.1, self.an_engine_joins),
            (0.1, self.the_coordinator_restarts),
        ]
        [(_, action)] = self.rng.choices(actions, weights=[weight for weight, _ in actions])
        action()
        self.coordinator.expire(self.now_s)

    def a_message_arrives(self) -> None:
        if not self.messages:
            return
        position = self.rng.randrange(len(self.messages))
        message = self.messages[position]
        fate = self.rng.random()
        if fate < 0.8:
            self.messages.pop(position)
        if fate > 0.15:  # above 0.8 it stays, and comes again
            self.replies.append((self.deliver(message), message.engine_id, message.epoch))

    def a_reply_arrives(self) -> None:
        if not self.replies:
            return
        reply, engine_id, epoch = self.replies.pop(self.rng.randrange(len(self.replies)))
        if self.rng.random() > 0.15 and engine_id in self.engines:
            self.messages += self.engines[engine_id].answer(reply, epoch)

    def an_engine_works(self) -> None:
        self.messages.append(self.any_engine().work(self.rng))

    def an_engine_beats(self) -> None:
        self.messages.append(self.any_engine().heartbeat())

    def an_engine_restarts(self) -> None:
        engine = self.any_engine()
        engine.restart()
        self.messages.append(engine.info())

    def an_engine_leaves(self) -> None:
        if len(self.engines) > 1:
            engine = self.any_engine()
            del self.engines[engine.engine_id]
            if self.rng.random() < 0.5:  # else it crashed
                self.coordinator.deregister(engine.engine_id, engine.epoch)

    def an_engine_joins(self) -> None:
        self.num_born += 1
        engine = Engine(EngineId(f"engine-{self.num_born}"))
        self.engines[engine.engine_id] = engine
        self.messages.append(engine.info())

    def the_coordinator_restarts(self) -> None:
        self.coordinator = Coordinator(heartbeat_timeout_s=TIMEOUT_S)

    def any_engine(self) -> Engine:
        return self.rng.choice(list(self.engines.values()))

    def settle(self) -> None:
        """What is under way arrives or is lost; then heartbeats over a reliable network."""
        while self.messages or self.replies:
            self.a_message_arrives()
            self.a_reply_arrives()
        self.now_s += TIMEOUT_S
        for _ in range(4):
            for engine in self.engines.values():
                said: list[Message] = [engine.heartbeat()]
                for message in said:
                    said += engine.answer(self.deliver(message), engine.epoch)
                    assert len(said) < 10, "it is asked for ever"
        self.coordinator.expire(self.now_s)


@pytest.mark.parametrize("seed", range(40))
def test_the_table_equals_the_truth_once_messages_get_through(seed: int) -> None:
    cluster = Cluster(seed)
    for _ in range(600):
        cluster.step()
    cluster.coordinator.check_invariants()
    cluster.settle()
    known = {info.engine_id: info.epoch for info in cluster.coordinator.engines}
    assert known == {engine.engine_id: engine.epoch for engine in cluster.engines.values()}
    for engine in cluster.engines.values():
        found = cluster.coordinator.blocks_held(engine.engine_id)
        assert found == set(map(hint_of, engine.keys))
        assert cluster.coordinator.heartbeat(engine.heartbeat(), cluster.now_s) == EngineReply()
    cluster.coordinator.check_invariants()
    # The dead leave nothing behind.
    for _ in range(10):
        cluster.coordinator.expire(cluster.now_s)
    assert not cluster.coordinator.table.has_dead
    assert cluster.coordinator.table.num_keys == len(
        {key for engine in cluster.engines.values() for key in engine.keys}
    )
