"""Which engine should give a request to which other one, once placement has proved wrong."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from pageray.cluster.coordinator.messages import EngineView
from pageray.cluster.ids import EngineId

MIN_DIFFERENCE = 2
"""Requests that the giver must have more than the taker: one moved must not want back."""


@dataclass(frozen=True)
class Move:
    giver: EngineId
    taker: EngineId


def pick_move(views: SequenceOf[EngineView]) -> Move | None:
    """From the engine with the longest queue to the least busy one without any; None if all is
    well. Only engines of one root key can take over each other's pages and requests."""
    givers = [view for view in views if view.load.num_waiting > 0]
    if not givers:
        return None
    giver = max(givers, key=lambda view: (view.load.num_waiting, view.info.engine_id))
    takers = [
        view
        for view in views
        if view.load.num_waiting == 0
        and view.info.root_key == giver.info.root_key
        and view.info.role == giver.info.role
        and _num_requests(giver) - _num_requests(view) >= MIN_DIFFERENCE
    ]
    if not takers:
        return None
    taker = min(takers, key=lambda view: (_num_requests(view), view.info.engine_id))
    return Move(giver.info.engine_id, taker.info.engine_id)


def _num_requests(view: EngineView) -> int:
    return view.load.num_running + view.load.num_waiting
