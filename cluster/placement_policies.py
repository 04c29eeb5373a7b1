"""Plain placements to compare with, and to fall back on: none looks at what is cached."""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

from pageray.cluster.coordinator.messages import EngineView
from pageray.cluster.ids import EngineId
from pageray.cluster.placement import Decision, RankedEngine, by_id, queued_tokens, rotate_ties


def round_robin(views: SequenceOf[EngineView], turn: int) -> Decision:
    """By engine id, beginning with number `turn` of them (counted round)."""
    ordered = by_id(views)
    rotate_ties(ordered, lambda _: None, turn)
    return _decision(ordered)


def least_loaded(
    views: SequenceOf[EngineView], assigned_tokens: Mapping[EngineId, int], tie_break: int
) -> Decision:
    """Fewest queued tokens, then fewest sequences, then as `tie_break` decides."""

    def load_of(view: EngineView) -> tuple[int, int]:
        return _load(view, assigned_tokens)

    ordered = sorted(by_id(views), key=load_of)
    rotate_ties(ordered, load_of, tie_break)
    return _decision(ordered)


def power_of_two(
    views: SequenceOf[EngineView],
    assigned_tokens: Mapping[EngineId, int],
    draws: tuple[int, int],
) -> Decision:
    """The less loaded of two engines, then the other one, then the rest by id.

    `draws` are two random numbers, 0 or more; they name two different engines if there are two.
    """
    ordered = by_id(views)
    if len(ordered) < 2:
        return _decision(ordered)
    first = draws[0] % len(ordered)
    second = (first + 1 + draws[1] % (len(ordered) - 1)) % len(ordered)
    pair = [ordered[first], ordered[second]]
    rest = [view for i, view in enumerate(ordered) if i not in (first, second)]
    pair.sort(key=lambda view: _load(view, assigned_tokens))
    return _decision(pair + rest)


def _load(view: EngineView, assigned_tokens: Mapping[EngineId, int]) -> tuple[int, int]:
    return (
        queued_tokens(view, assigned_tokens),
        max(0, view.load.num_running) + max(0, view.load.num_waiting),
    )


def _decision(views: SequenceOf[EngineView]) -> Decision:
    """These policies estimate nothing: every estimate is 0."""
    return Decision(
        ranking=tuple(
            RankedEngine(
                engine_id=view.info.engine_id,
                estimate_s=0.0,
                num_matched_blocks=view.num_matched_blocks,
            )
            for view in views
        )
    )
