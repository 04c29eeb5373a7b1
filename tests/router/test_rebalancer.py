"""A queue beside an idle engine is noticed, but not at the first look."""

import asyncio

from pageray.cluster.coordinator.messages import EngineView, Location
from pageray.cluster.ids import BlockKey, EngineId
from pageray.cluster.rebalance import Move
from pageray.router.rebalancer import Rebalancer
from pageray.router.replica_board import ReplicaBoard
from pageray.router.wire import ModelFacts
from placement_views import FACTS, view_of


class Streams:
    def __init__(self) -> None:
        self.moves: list[Move] = []

    def move_one(self, move: Move) -> bool:
        self.moves.append(move)
        return True


class Lookup:
    def __init__(self) -> None:
        self.views: tuple[EngineView, ...] = ()

    async def locate(self, root_key: BlockKey, keys: tuple[BlockKey, ...]) -> Location:
        return Location(engines=self.views)


def run(looks: list[tuple[EngineView, ...]], facts: ModelFacts = FACTS) -> list[Move]:
    board = ReplicaBoard()
    board.update([EngineId("a"), EngineId("b")])
    lookup, streams = Lookup(), Streams()

    async def scenario() -> None:
        rebalancer = Rebalancer(lookup, board, streams)
        for views in looks:
            lookup.views = views
            await rebalancer.look(facts)

    asyncio.run(scenario())
    return streams.moves


BUSY = (view_of("a", num_running=6, num_waiting=3), view_of("b"))
CALM = (view_of("a", num_running=6), view_of("b"))
GONE = (view_of("a", num_running=6, num_waiting=3), view_of("not-routed-to"))
MOVE = Move(EngineId("a"), EngineId("b"))


def test_a_lasting_queue_moves_one_request_at_a_time() -> None:
    assert run([BUSY, BUSY]) == [MOVE]
    assert run([BUSY, BUSY, BUSY]) == [MOVE]
    assert run([BUSY, BUSY, BUSY, BUSY]) == [MOVE, MOVE]


def test_a_moment_of_waiting_moves_nothing() -> None:
    assert run([BUSY, CALM, BUSY, CALM]) == []


def test_nothing_moves_to_a_replica_that_serve_does_not_route_to() -> None:
    assert run([GONE, GONE, GONE]) == []
