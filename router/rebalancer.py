"""Moves requests from engines with a queue to engines without one."""

import asyncio
import logging
from typing import Protocol

from pageray.cluster.coordinator.errors import CoordinatorUnavailableError
from pageray.cluster.rebalance import Move, pick_move
from pageray.router.cluster_placer import PrefixLookup
from pageray.router.replica_board import ReplicaBoard
from pageray.router.wire import ModelFacts

logger = logging.getLogger(__name__)

PERIOD_S = 1.0
"""Longer than a report of load is old, so that the effect of a move is seen before the next."""


class Streams(Protocol):
    def move_one(self, move: Move) -> bool:
        """Let one request leave the giver for the taker: one without a token yet if there is any,
        else the latest with its pages. False if none of this ingress runs there."""
        ...


class Rebalancer:
    """A task of one event loop, from `start` on while requests come."""

    def __init__(self, lookup: PrefixLookup, board: ReplicaBoard, streams: Streams) -> None:
        self._lookup = lookup
        self._board = board
        self._streams = streams
        self._task: asyncio.Task[None] | None = None
        self._suspected: Move | None = None

    def start(self, facts: ModelFacts) -> None:
        """Begin to look, unless that has been done."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(facts))

    async def look(self, facts: ModelFacts) -> None:
        """Once: a move that was due the last time and still is gets made."""
        try:
            async with asyncio.timeout(PERIOD_S):
                location = await self._lookup.locate(facts.root_key, ())
        except (CoordinatorUnavailableError, TimeoutError):
            self._suspected = None
            return
        live = self._board.live
        move = pick_move([view for view in location.engines if view.info.engine_id in live])
        if move is not None and move == self._suspected and self._streams.move_one(move):
            logger.info("a request moves from %s to %s", move.giver, move.taker)
            move = None
        self._suspected = move

    async def _run(self, facts: ModelFacts) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            await self.look(facts)
