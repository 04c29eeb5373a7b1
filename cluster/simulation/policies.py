"""The placements that can be compared, by name."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from pageray.cluster.coordinator.messages import EngineView
from pageray.cluster.placement import Decision, PlacementRequest, choose
from pageray.cluster.placement_policies import least_loaded, power_of_two, round_robin
from pageray.cluster.simulation.randomness import Rng

Views = tuple[EngineView, ...]
Place = Callable[[Views, PlacementRequest], Decision]


@dataclass(frozen=True, kw_only=True)
class Policy:
    make: Callable[[Rng], Place]
    can_move: bool
    """Whether engines pull pages from each other."""
    description: str


def _ours(_: Rng) -> Place:
    return choose


def _round_robin(_: Rng) -> Place:
    turns = itertools.count()
    return lambda views, _: round_robin(views, next(turns))


def _power_of_two(rng: Rng) -> Place:
    def place(views: Views, request: PlacementRequest) -> Decision:
        draws = (rng.getrandbits(30), rng.getrandbits(30))
        return power_of_two(views, request.assigned_tokens, draws)

    return place


def _least_loaded(_: Rng) -> Place:
    return lambda views, now: least_loaded(views, now.assigned_tokens, now.tie_break)


POLICIES: dict[str, Policy] = {
    "ours": Policy(make=_ours, can_move=True, description="route or move"),
    "route-only": Policy(make=_ours, can_move=False, description="ours, no pages are moved"),
    "move-only": Policy(
        make=_least_loaded, can_move=True, description="least loaded; engines pull what they lack"
    ),
    "least-loaded": Policy(make=_least_loaded, can_move=False, description="fewest queued tokens"),
    "power-of-two": Policy(
        make=_power_of_two, can_move=False, description="the less loaded of two at random"
    ),
    "round-robin": Policy(make=_round_robin, can_move=False, description="in turn"),
}
