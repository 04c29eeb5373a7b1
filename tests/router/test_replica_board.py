import asyncio
import threading

from pageray.cluster.ids import EngineId
from pageray.router.failure_memory import SUSPICION_S, FailureMemory
from pageray.router.replica_board import ReplicaBoard, board_of

A, B = EngineId("a"), EngineId("b")


def test_nobody_leaves_before_the_router_has_spoken() -> None:
    assert not ReplicaBoard().should_leave(A)


def test_a_stream_leaves_when_its_replica_goes_and_another_stays() -> None:
    board = ReplicaBoard()
    board.update([A, B])
    assert not board.should_leave(A)
    board.update([B])
    assert board.should_leave(A)
    board.update([])
    assert not board.should_leave(A)


def test_listeners_are_woken_on_their_own_loop() -> None:
    board = ReplicaBoard()

    async def scenario() -> None:
        woken = asyncio.Event()
        subscription = board.subscribe(woken.set)
        threading.Thread(target=board.update, args=([A],)).start()
        await asyncio.wait_for(woken.wait(), 5)
        board.unsubscribe(subscription)
        woken.clear()
        board.update([B])
        await asyncio.sleep(0)
        assert not woken.is_set()

    asyncio.run(scenario())


def test_one_board_per_deployment() -> None:
    assert board_of("app", "x") is board_of("app", "x")
    assert board_of("app", "x") is not board_of("other", "x")


def test_failures_are_forgotten_after_a_while() -> None:
    memory = FailureMemory()
    memory.failed(A, 0.0)
    memory.failed(B, SUSPICION_S - 1)
    assert memory.suspects(SUSPICION_S - 0.5) == {A, B}
    assert memory.suspects(SUSPICION_S) == {B}
