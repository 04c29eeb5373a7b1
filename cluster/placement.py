"""On which engine a request should run: where its first token is likely to come soonest.

    time to first token = queue ahead / prefill rate                    what is there already
                        + tokens it lacks / prefill rate                or, if shorter: latency
                          + bytes pulled / pull rate + the rest         + pages from another engine
                        + decode load

An engine far busier than the others is not chosen for its cache alone. Nothing here raises, on
whatever engines report: inside a Serve request router an exception leaves the request hanging.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from itertools import takewhile
from statistics import median
from typing import TypeVar

from pageray.cluster.coordinator.messages import EngineInfo, EngineLoad, EngineView
from pageray.cluster.ids import EngineId

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class PlacementSettings:
    """Constants of the estimate, and how far it may be overruled."""

    default_prefill_tokens_per_s: float = 2000.0
    """Where no engine has measured its own."""
    default_pull_bytes_per_s: float = 10e9
    """Hopeful on purpose: a rate is measured only by pulling. A guess too high costs a slow pull
    or two until some engine has measured; one too low and nobody ever does."""
    pull_latency_s: float = 0.01
    """To find a holder, ask it and hear that all pages are there."""
    decode_s_per_sequence: float = 0.001
    """What each running sequence adds to the steps of a prefill beside it."""
    max_imbalance: float = 2.0
    """A queue longer than this many times the average of the other engines' ..."""
    imbalance_slack_s: float = 1.0
    """... plus this puts an engine behind all others, whatever it has cached."""
    affinity_factor: float = 1.5
    """The preferred engine wins up to this many times the best estimate ..."""
    affinity_slack_s: float = 0.05
    """... plus this."""


DEFAULT_SETTINGS = PlacementSettings()


@dataclass(frozen=True, kw_only=True)
class PlacementRequest:
    """What is to be placed, and what this router knows beyond the engines' reports."""

    num_prompt_tokens: int
    tie_break: int = 0
    """Decides between equal engines; the caller draws it at random."""
    preferred: EngineId | None = None
    """Where the session's last request ran."""
    assigned_tokens: Mapping[EngineId, int] = field(default_factory=dict[EngineId, int])
    """Tokens this router has sent since the load was reported and that wait for their prefill."""
    predicted_blocks: Mapping[EngineId, int] = field(default_factory=dict[EngineId, int])
    """`PredictedPlacements.longest_runs` of this prompt."""


@dataclass(frozen=True, kw_only=True)
class RankedEngine:
    engine_id: EngineId
    estimate_s: float
    """Of the time to the first token."""
    num_matched_blocks: int
    """Leading blocks it holds, or is about to: the larger of report and prediction."""
    is_overloaded: bool = False
    """Beyond the bound on imbalance."""


@dataclass(frozen=True, kw_only=True)
class PullPlan:
    """Blocks `first_block` .. `first_block + num_blocks` of the prompt can come from `source`."""

    source: EngineInfo
    first_block: int
    num_blocks: int


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Every candidate, the best first; empty without engines."""

    ranking: tuple[RankedEngine, ...]
    pull: PullPlan | None = None
    """For the first of the ranking, when pulling is quicker than computing."""

    @property
    def engine_ids(self) -> tuple[EngineId, ...]:
        return tuple(ranked.engine_id for ranked in self.ranking)


def choose(
    views: SequenceOf[EngineView],
    request: PlacementRequest,
    settings: PlacementSettings = DEFAULT_SETTINGS,
) -> Decision:
    """Rank the engines: those within the bound on imbalance first, then by estimate.

    Equal inputs give equal decisions. Engines that only decode come into question only when there
    are no others.
    """
    candidates = [view for view in views if view.info.role != "decode"] or list(views)
    if not candidates:
        return Decision(ranking=())
    estimator = _Estimator(views, request, settings)
    overloaded = _overloaded(candidates, estimator.queues_s, settings)
    ranking = [
        RankedEngine(
            engine_id=view.info.engine_id,
            estimate_s=estimator.estimate_s(view),
            num_matched_blocks=estimator.num_matched(view),
            is_overloaded=view.info.engine_id in overloaded,
        )
        for view in by_id(candidates)
    ]
    ranking.sort(key=_rank)
    rotate_ties(ranking, _rank, request.tie_break)
    _put_preferred_first(ranking, request.preferred, settings)
    first = next(v for v in candidates if v.info.engine_id == ranking[0].engine_id)
    return Decision(ranking=tuple(ranking), pull=estimator.pull_plan(first))


def by_id(views: SequenceOf[EngineView]) -> list[EngineView]:
    """The order that decides where nothing else does, before ties are rotated."""
    return sorted(views, key=lambda view: view.info.engine_id)


def rotate_ties(ordered: list[T], key: Callable[[T], object], tie_break: int) -> None:
    """Begin among those equal to the first at a place that `tie_break` decides, in place.

    Each of them comes first equally often. Turning the whole list before sorting would not do:
    whoever follows the unequal ones would come first more often.
    """
    num_tied = sum(1 for _ in takewhile(lambda item: key(item) == key(ordered[0]), ordered))
    start = tie_break % max(1, num_tied)
    ordered[:num_tied] = ordered[start:num_tied] + ordered[:start]


def queued_tokens(view: EngineView, assigned_tokens: Mapping[EngineId, int]) -> int:
    """What the engine reports, and what it was sent since."""
    assigned = assigned_tokens.get(view.info.engine_id, 0)
    return max(0, view.load.num_queued_tokens) + max(0, assigned)


class _Estimator:
    """The estimate for each engine; sources of pages are found once for all of them."""

    def __init__(
        self,
        views: SequenceOf[EngineView],
        request: PlacementRequest,
        settings: PlacementSettings,
    ) -> None:
        self._request = request
        self._settings = settings
        self._prefill_rate = _typical(
            (view.load.prefill_tokens_per_s for view in views),
            settings.default_prefill_tokens_per_s,
        )
        self._pull_rate = _typical(
            (view.load.pull_bytes_per_s for view in views), settings.default_pull_bytes_per_s
        )
        self.queues_s = {view.info.engine_id: self._queue_s(view) for view in views}
        holders = [view for view in views if view.info.endpoint and view.num_matched_blocks > 0]
        holders.sort(key=lambda view: (-view.num_matched_blocks, view.info.engine_id))
        # An engine does not pull from itself, so the two best are enough.
        self._holders = holders[:2]

    def num_matched(self, view: EngineView) -> int:
        predicted = self._request.predicted_blocks.get(view.info.engine_id, 0)
        return max(0, view.num_matched_blocks, predicted)

    def estimate_s(self, view: EngineView) -> float:
        prefill_s = min(self._compute_s(view, self.num_matched(view)), self._pull_s(view))
        decode_s = self._settings.decode_s_per_sequence * max(0, view.load.num_running)
        return self.queues_s[view.info.engine_id] + prefill_s + decode_s

    def pull_plan(self, view: EngineView) -> PullPlan | None:
        """What to pull, if that is quicker than computing it."""
        source = self._source_for(view)
        first = self.num_matched(view)
        if source is None or self._pull_s(view) >= self._compute_s(view, first):
            return None
        return PullPlan(
            source=source.info, first_block=first, num_blocks=source.num_matched_blocks - first
        )

    def _queue_s(self, view: EngineView) -> float:
        return queued_tokens(view, self._request.assigned_tokens) / self._rate_of(view.load)

    def _compute_s(self, view: EngineView, num_blocks: int) -> float:
        """To compute the prompt behind its first `num_blocks`; the last token always is."""
        missing = self._request.num_prompt_tokens - num_blocks * view.info.block_size
        return max(1, missing) / self._rate_of(view.load)

    def _pull_s(self, view: EngineView) -> float:
        """To pull what the best source has more, and compute the rest; infinite without one."""
        source = self._source_for(view)
        if source is None:
            return math.inf
        num_blocks = source.num_matched_blocks - self.num_matched(view)
        num_bytes = num_blocks * _block_bytes(view.info)
        rate = view.load.pull_bytes_per_s
        pull_s = num_bytes / (rate if _is_measured(rate) else self._pull_rate)
        rest_s = self._compute_s(view, source.num_matched_blocks)
        return self._settings.pull_latency_s + pull_s + rest_s

    def _source_for(self, view: EngineView) -> EngineView | None:
        if view.info.endpoint is None:
            return None
        for source in self._holders:
            if source.info.engine_id == view.info.engine_id:
                continue
            can_share = source.info.root_key == view.info.root_key
            return source if can_share and self._has_more(source, view) else None
        return None

    def _has_more(self, source: EngineView, view: EngineView) -> bool:
        return source.num_matched_blocks > self.num_matched(view)

    def _rate_of(self, load: EngineLoad) -> float:
        rate = load.prefill_tokens_per_s
        return rate if _is_measured(rate) else self._prefill_rate


def _rank(ranked: RankedEngine) -> tuple[bool, float]:
    return ranked.is_overloaded, ranked.estimate_s


def _overloaded(
    candidates: SequenceOf[EngineView],
    queues_s: Mapping[EngineId, float],
    settings: PlacementSettings,
) -> set[EngineId]:
    """Those whose queue is out of proportion to the average of the others'."""
    num_others = len(candidates) - 1
    if num_others < 1:
        return set()
    total_s = sum(queues_s[view.info.engine_id] for view in candidates)
    overloaded: set[EngineId] = set()
    for view in candidates:
        queue_s = queues_s[view.info.engine_id]
        average_s = (total_s - queue_s) / num_others
        if queue_s > settings.max_imbalance * average_s + settings.imbalance_slack_s:
            overloaded.add(view.info.engine_id)
    return overloaded


def _put_preferred_first(
    ranking: list[RankedEngine], preferred: EngineId | None, settings: PlacementSettings
) -> None:
    limit_s = settings.affinity_factor * ranking[0].estimate_s + settings.affinity_slack_s
    for position, ranked in enumerate(ranking):
        if ranked.engine_id == preferred:
            if not ranked.is_overloaded and ranked.estimate_s <= limit_s:
                ranking.insert(0, ranking.pop(position))
            return


def _block_bytes(info: EngineInfo) -> int:
    return sum(info.layout.page_bytes(rank) for rank in range(len(info.layout.shards)))


def _typical(rates: Iterable[float], default: float) -> float:
    measured = [rate for rate in rates if _is_measured(rate)]
    return median(measured) if measured else default


def _is_measured(rate: float) -> bool:
    return math.isfinite(rate) and rate > 0
