"""The coordinator, message by message. `test_convergence.py` mixes them at random."""

import random

import pytest

from pageray.cluster.coordinator.block_table import hint_of
from pageray.cluster.coordinator.coordinator import Coordinator
from pageray.cluster.coordinator.event_cursor import EventCursor
from pageray.cluster.coordinator.messages import (
    BlockEvent,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
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

ROOT = BlockKey(b"r" * 32)
KEYS = tuple(BlockKey(random.Random(number).randbytes(32)) for number in range(50))
A, B, C = EngineId("a"), EngineId("b"), EngineId("c")
OK = EngineReply()
REGISTER = EngineReply(must_register=True)
SNAPSHOT = EngineReply(must_send_snapshot=True)
STALE = EngineReply(is_stale=True)


def info_of(
    engine_id: EngineId, epoch: int = 1, *, root_key: BlockKey = ROOT, can_push: bool = True
) -> EngineInfo:
    return EngineInfo(
        engine_id=engine_id,
        epoch=Epoch(epoch),
        root_key=root_key,
        block_size=16,
        num_blocks=100,
        layout=PoolLayout(
            num_layers=2, block_size=16, head_dim=8, element_bytes=2, shards=((0, 2),)
        ),
        endpoint=Endpoint(control_address="h:1", data_address="h:2", host_id="h", pid=1)
        if can_push
        else None,
    )


def batch_of(engine_id: EngineId, number: int, *events: BlockEvent, epoch: int = 1) -> EventBatch:
    return EventBatch(
        engine_id=engine_id, epoch=Epoch(epoch), sequence_number=number, events=events
    )


def stored(engine_id: EngineId, number: int, *positions: int, epoch: int = 1) -> EventBatch:
    event = BlocksStored(keys=tuple(KEYS[i] for i in positions))
    return batch_of(engine_id, number, event, epoch=epoch)


def removed(engine_id: EngineId, number: int, *positions: int) -> EventBatch:
    return batch_of(engine_id, number, BlocksRemoved(keys=tuple(KEYS[i] for i in positions)))


def snapshot_of(engine_id: EngineId, number: int, num_keys: int, epoch: int = 1) -> Snapshot:
    return Snapshot(
        engine_id=engine_id, epoch=Epoch(epoch), sequence_number=number, keys=KEYS[:num_keys]
    )


def heartbeat_of(
    engine_id: EngineId, number: int, epoch: int = 1, load: EngineLoad | None = None
) -> Heartbeat:
    return Heartbeat(
        engine_id=engine_id,
        epoch=Epoch(epoch),
        load=EngineLoad() if load is None else load,
        sequence_number=number,
    )


def join(coordinator: Coordinator, engine_id: EngineId, num_keys: int = 0, epoch: int = 1) -> None:
    """Registered, with the first `num_keys` keys as of batch 0."""
    assert coordinator.register(info_of(engine_id, epoch), 0.0) == SNAPSHOT
    assert coordinator.restore(snapshot_of(engine_id, 0, num_keys, epoch)) == OK


def held(coordinator: Coordinator, engine_id: EngineId) -> list[int]:
    """Positions in KEYS that the coordinator believes an engine to hold."""
    hints = coordinator.blocks_held(engine_id)
    return [i for i, key in enumerate(KEYS) if hint_of(key) in hints]


def matched(coordinator: Coordinator, now_s: float = 0.0) -> dict[EngineId, int]:
    views = coordinator.locate(ROOT, KEYS, now_s).engines
    return {view.info.engine_id: view.num_matched_blocks for view in views}


def test_batches_in_order_are_followed() -> None:
    coordinator = Coordinator()
    join(coordinator, A)
    assert coordinator.apply(stored(A, 1, 0, 1, 2)) == OK
    assert coordinator.apply(removed(A, 2, 2)) == OK
    assert held(coordinator, A) == [0, 1]
    assert coordinator.apply(batch_of(A, 3, CacheCleared(), BlocksStored(keys=KEYS[:1]))) == OK
    assert held(coordinator, A) == [0]
    coordinator.check_invariants()


def test_who_is_unknown_must_register() -> None:
    coordinator = Coordinator()
    assert coordinator.heartbeat(heartbeat_of(A, 0), 0.0) == REGISTER
    assert coordinator.apply(stored(A, 1, 0)) == REGISTER
    assert coordinator.restore(snapshot_of(A, 1, 3)) == REGISTER
    assert matched(coordinator) == {}


def test_an_engine_met_in_mid_life_is_asked_until_it_sends_a_snapshot() -> None:
    # Elsewhere, an engine seen before its registration was never asked again.
    coordinator = Coordinator()
    assert coordinator.apply(stored(A, 7, 0)) == REGISTER
    for _ in range(2):
        assert coordinator.register(info_of(A), 0.0) == SNAPSHOT
        assert coordinator.heartbeat(heartbeat_of(A, 7), 0.0) == SNAPSHOT
        assert coordinator.apply(stored(A, 8, 1)) == SNAPSHOT
    assert matched(coordinator) == {A: 0}
    assert coordinator.restore(snapshot_of(A, 8, 2)) == OK
    assert matched(coordinator) == {A: 2}


def test_a_gap_asks_for_a_snapshot_and_nothing_that_comes_meanwhile_is_lost() -> None:
    coordinator = Coordinator()
    join(coordinator, A)
    assert coordinator.apply(stored(A, 2, 5)) == SNAPSHOT
    assert coordinator.apply(stored(A, 4, 9)) == SNAPSHOT
    assert held(coordinator, A) == []
    # The snapshot states the batch that it is valid at; 3 is covered, 4 comes on top.
    assert coordinator.restore(snapshot_of(A, 3, 4)) == OK
    assert held(coordinator, A) == [0, 1, 2, 3, 9]
    assert coordinator.apply(removed(A, 5, 3)) == OK
    assert held(coordinator, A) == [0, 1, 2, 9]


def test_a_snapshot_from_before_the_hole_does_not_close_it() -> None:
    coordinator = Coordinator()
    join(coordinator, A)
    assert coordinator.apply(stored(A, 3, 5)) == SNAPSHOT
    assert coordinator.restore(snapshot_of(A, 1, 1)) == SNAPSHOT
    assert held(coordinator, A) == [0]
    assert coordinator.restore(snapshot_of(A, 2, 2)) == OK
    assert held(coordinator, A) == [0, 1, 5]


def test_a_late_batch_closes_the_hole_without_a_snapshot() -> None:
    coordinator = Coordinator()
    join(coordinator, A)
    assert coordinator.apply(removed(A, 2, 0)) == SNAPSHOT
    assert coordinator.apply(stored(A, 1, 0, 1)) == OK
    assert held(coordinator, A) == [1]


def test_a_snapshot_never_takes_the_cursor_back() -> None:
    # Elsewhere, a dump with made-up numbers did, and recovery went round in circles.
    coordinator = Coordinator()
    join(coordinator, A)
    coordinator.apply(stored(A, 1, 0))
    coordinator.apply(stored(A, 2, 1))
    assert coordinator.restore(snapshot_of(A, 1, 1)) == OK
    assert held(coordinator, A) == [0, 1]
    assert coordinator.apply(stored(A, 2, 30)) == OK
    assert coordinator.apply(stored(A, 3, 2)) == OK
    assert held(coordinator, A) == [0, 1, 2]


def test_repeated_messages_change_nothing() -> None:
    coordinator = Coordinator()
    join(coordinator, A)
    coordinator.apply(stored(A, 1, 0, 1))
    coordinator.apply(removed(A, 2, 1))
    for _ in range(2):
        assert coordinator.apply(stored(A, 1, 0, 1)) == OK
        assert coordinator.apply(removed(A, 2, 1)) == OK
        assert coordinator.register(info_of(A), 0.0) == OK
        assert coordinator.restore(snapshot_of(A, 2, 1)) == OK
    assert held(coordinator, A) == [0]
    coordinator.check_invariants()


def test_a_heartbeat_tells_of_a_lost_last_batch() -> None:
    coordinator = Coordinator()
    join(coordinator, A)
    assert coordinator.heartbeat(heartbeat_of(A, 0), 1.0) == OK
    assert coordinator.heartbeat(heartbeat_of(A, 1), 2.0) == SNAPSHOT
    assert coordinator.apply(stored(A, 1, 0)) == OK
    assert coordinator.heartbeat(heartbeat_of(A, 1), 3.0) == OK


def test_a_new_epoch_voids_all_that_was_said_before() -> None:
    coordinator = Coordinator()
    join(coordinator, A, num_keys=5)
    coordinator.apply(stored(A, 1, 9))
    assert coordinator.register(info_of(A, epoch=2), 0.0) == SNAPSHOT
    assert matched(coordinator) == {A: 0}
    for reply in (
        coordinator.register(info_of(A), 0.0),
        coordinator.heartbeat(heartbeat_of(A, 9), 0.0),
        coordinator.apply(stored(A, 2, 0)),
        coordinator.restore(snapshot_of(A, 2, 9)),
    ):
        assert reply == STALE
    coordinator.deregister(A, Epoch(1))
    # The new epoch counts from 1 again.
    assert coordinator.restore(snapshot_of(A, 0, 0, epoch=2)) == OK
    assert coordinator.apply(stored(A, 1, 0, epoch=2)) == OK
    assert matched(coordinator) == {A: 1}
    coordinator.check_invariants()


@pytest.mark.parametrize("kind", ["heartbeat", "batch", "snapshot"])
def test_a_newer_epoch_heard_of_before_it_registered_voids_the_old_one_too(kind: str) -> None:
    coordinator = Coordinator()
    join(coordinator, A, num_keys=5)
    replies = {
        "heartbeat": lambda: coordinator.heartbeat(heartbeat_of(A, 0, epoch=2), 0.0),
        "batch": lambda: coordinator.apply(stored(A, 1, 0, epoch=2)),
        "snapshot": lambda: coordinator.restore(snapshot_of(A, 0, 2, epoch=2)),
    }
    assert replies[kind]() == REGISTER
    assert matched(coordinator) == {}


def test_deregistering_clears_the_numbers() -> None:
    # Elsewhere the watermark stayed, and the events of a re-registered worker were misjudged.
    coordinator = Coordinator()
    join(coordinator, A)
    for number in range(1, 6):
        coordinator.apply(stored(A, number, number))
    coordinator.deregister(A, Epoch(1))
    assert matched(coordinator) == {}
    coordinator.deregister(A, Epoch(1))
    join(coordinator, A)
    assert coordinator.apply(stored(A, 1, 0)) == OK
    assert matched(coordinator) == {A: 1}
    coordinator.check_invariants()


def test_a_silent_engine_is_dropped_even_if_its_events_still_come() -> None:
    coordinator = Coordinator(heartbeat_timeout_s=10.0)
    join(coordinator, A, num_keys=5)
    join(coordinator, B, num_keys=3)
    coordinator.heartbeat(heartbeat_of(B, 0), 5.0)
    coordinator.expire(9.9)
    coordinator.apply(stored(A, 1, 20))
    assert matched(coordinator, 9.9) == {A: 5, B: 3}
    assert matched(coordinator, 10.0) == {B: 3}
    assert coordinator.apply(stored(A, 2, 21)) == REGISTER
    coordinator.expire(15.0)
    assert coordinator.engines == []
    coordinator.check_invariants()


def test_locate_shows_live_engines_of_the_same_kind_in_order_of_id() -> None:
    coordinator = Coordinator()
    join(coordinator, C, num_keys=2)
    join(coordinator, A)
    coordinator.register(info_of(B, root_key=BlockKey(b"o" * 32)), 0.0)
    load = EngineLoad(num_running=3, num_queued_tokens=70)
    coordinator.heartbeat(heartbeat_of(C, 0, load=load), 0.0)
    views = coordinator.locate(ROOT, KEYS, 0.0).engines
    assert [(view.info.engine_id, view.num_matched_blocks) for view in views] == [(A, 0), (C, 2)]
    assert views[1].load == load
    assert [v.info.engine_id for v in coordinator.locate(BlockKey(b"o" * 32), (), 0.0).engines] == [
        B
    ]
    assert coordinator.locate(BlockKey(b"?" * 32), KEYS, 0.0).engines == ()


def test_an_old_heartbeat_does_not_overwrite_a_newer_load() -> None:
    coordinator = Coordinator()
    join(coordinator, A)
    coordinator.heartbeat(heartbeat_of(A, 5, load=EngineLoad(num_running=2)), 0.0)
    coordinator.heartbeat(heartbeat_of(A, 4, load=EngineLoad(num_running=9)), 0.0)
    assert coordinator.locate(ROOT, (), 0.0).engines[0].load.num_running == 2


def find(coordinator: Coordinator, exclude: EngineId = C, now_s: float = 0.0, min_blocks: int = 1):
    return coordinator.best_holder(ROOT, KEYS, min_blocks=min_blocks, exclude=exclude, now_s=now_s)


def test_pullers_spread_over_equal_holders() -> None:
    coordinator = Coordinator()
    for engine_id in (B, A, C):
        join(coordinator, engine_id, num_keys=5)
    holders = [find(coordinator) for _ in range(4)]
    assert [h and h.info.engine_id for h in holders] == [A, B, A, B]
    assert {h.num_matched_blocks for h in holders if h} == {5}
    assert holders[1] is not None
    coordinator.end_lease(holders[1].lease_id)
    coordinator.end_lease(holders[1].lease_id)
    coordinator.check_invariants()
    again = find(coordinator)
    assert again is not None
    assert again.info.engine_id == B
    # A longer run is worth more than a holder with fewer leases.
    coordinator.apply(stored(A, 1, 5))
    assert [h and h.info.engine_id for h in (find(coordinator) for _ in range(3))] == [A, A, A]


def test_there_may_be_no_holder() -> None:
    coordinator = Coordinator()
    join(coordinator, C, num_keys=5)
    assert find(coordinator, min_blocks=0) is None
    join(coordinator, A, num_keys=4)
    assert find(coordinator, min_blocks=5) is None
    assert find(coordinator, min_blocks=4) is not None
    coordinator.register(info_of(B, can_push=False), 0.0)
    coordinator.restore(snapshot_of(B, 0, 9))
    best = find(coordinator)
    assert best is not None
    assert (best.info.engine_id, best.num_matched_blocks) == (A, 4)


def test_a_lease_ends_with_its_time_and_with_its_engine() -> None:
    coordinator = Coordinator(lease_s=3.0, heartbeat_timeout_s=100.0)
    join(coordinator, A, num_keys=5)
    join(coordinator, B, num_keys=5)
    chosen = [find(coordinator, now_s=now_s) for now_s in (0.0, 2.0, 3.0, 3.5)]
    # At 3.0 the first lease has ended, so A has none again; at 3.5 each has one.
    assert [h and h.info.engine_id for h in chosen] == [A, B, A, A]
    join(coordinator, A, num_keys=5, epoch=2)
    assert (found := find(coordinator, now_s=4.0)) is not None
    assert (found.info.engine_id, found.info.epoch) == (A, 2)
    coordinator.check_invariants()


def test_waiting_batches_are_bounded_and_what_was_let_go_is_asked_for() -> None:
    cursor = EventCursor(max_waiting=2)
    assert cursor.rebase(0) == []
    for number in (5, 3, 4):
        assert cursor.accept(stored(A, number, number)) == []
    later = cursor.rebase(2)
    assert later == []  # 3 was let go
    assert cursor.needs_snapshot
    later = cursor.rebase(3)
    assert later is not None
    assert [batch.sequence_number for batch in later] == [4, 5]
    assert not cursor.needs_snapshot
