"""Placement, one pitfall of other routers at a time."""

import math
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pageray.cluster.coordinator.messages import (
    Endpoint,
    EngineInfo,
    EngineLoad,
    EngineView,
    Role,
)
from pageray.cluster.ids import BlockKey, EngineId, Epoch
from pageray.cluster.page_layout import PoolLayout
from pageray.cluster.placement import (
    Decision,
    PlacementRequest,
    PlacementSettings,
    choose,
)
from pageray.cluster.placement_policies import least_loaded, power_of_two, round_robin
from pageray.cluster.predicted_placements import PredictedPlacements

BLOCK_SIZE = 16
LAYOUT = PoolLayout(
    num_layers=32, block_size=BLOCK_SIZE, head_dim=128, element_bytes=2, shards=((0, 4), (4, 8))
)
BLOCK_BYTES = 2 * 32 * 8 * BLOCK_SIZE * 128 * 2
RATE = 1000.0
KEYS = tuple(BlockKey(random.Random(number).randbytes(32)) for number in range(100))
NO_DECODE = PlacementSettings(decode_s_per_sequence=0.0)


def view_of(
    name: str,
    *,
    matched: int = 0,
    queued: int = 0,
    running: int = 0,
    rate: float = RATE,
    pull_rate: float = 0.0,
    role: Role = "both",
    can_move_pages: bool = False,
    root_key: bytes = b"r" * 32,
) -> EngineView:
    info = EngineInfo(
        engine_id=EngineId(name),
        epoch=Epoch(1),
        root_key=BlockKey(root_key),
        block_size=BLOCK_SIZE,
        num_blocks=1000,
        layout=LAYOUT,
        role=role,
        endpoint=Endpoint(control_address="h:1", data_address="h:2", host_id="h", pid=1)
        if can_move_pages
        else None,
    )
    load = EngineLoad(
        num_running=running,
        num_queued_tokens=queued,
        prefill_tokens_per_s=rate,
        pull_bytes_per_s=pull_rate,
    )
    return EngineView(info=info, load=load, num_matched_blocks=matched)


def estimates(decision: Decision) -> dict[EngineId, float]:
    return {ranked.engine_id: ranked.estimate_s for ranked in decision.ranking}


def test_the_estimate_is_queue_plus_what_is_missing_plus_decode() -> None:
    views = [
        view_of("a", matched=50, queued=500, running=4),
        view_of("b", rate=500.0),
        view_of("c", matched=200),
    ]
    request = PlacementRequest(num_prompt_tokens=1600, assigned_tokens={EngineId("b"): 300})
    found = estimates(choose(views, request, PlacementSettings(decode_s_per_sequence=0.01)))
    assert found[EngineId("a")] == pytest.approx(0.5 + 0.8 + 0.04)
    assert found[EngineId("b")] == pytest.approx(300 / 500 + 1600 / 500)
    # More than the whole prompt is cached, yet its last token is computed.
    assert found[EngineId("c")] == pytest.approx(1 / 1000)


def test_no_engines_give_an_empty_ranking() -> None:
    request = PlacementRequest(num_prompt_tokens=10, tie_break=3, preferred=EngineId("gone"))
    assert choose([], request) == Decision(ranking=())
    assert round_robin([], 5).ranking == ()
    assert least_loaded([], {}, 5).ranking == ()
    assert power_of_two([], {}, (3, 4)).ranking == ()


def test_an_idle_cluster_without_any_measurement_is_spread_by_the_tie_break() -> None:
    views = [view_of(name, rate=0.0) for name in "dbca"]
    firsts: Counter[EngineId] = Counter()
    for tie_break in range(40):
        request = PlacementRequest(num_prompt_tokens=100, tie_break=tie_break)
        decision = choose(views, request)
        assert decision == choose(list(reversed(views)), request)
        assert all(0 < ranked.estimate_s < math.inf for ranked in decision.ranking)
        firsts[decision.engine_ids[0]] += 1
    assert firsts == dict.fromkeys("abcd", 10)


def test_an_unmeasured_engine_counts_as_typical() -> None:
    views = [view_of("a", rate=100.0), view_of("b", rate=0.0), view_of("c", rate=300.0)]
    views += [view_of("d", rate=math.nan), view_of("e", rate=-1.0)]
    found = estimates(choose(views, PlacementRequest(num_prompt_tokens=200)))
    for name in "bde":
        assert found[EngineId(name)] == pytest.approx(1.0)


def test_a_miss_goes_by_load_not_to_the_smallest_cache() -> None:
    # Elsewhere every miss went to the worker with the fewest cached blocks: a stuck one, mostly.
    views = [view_of("empty", queued=5000), view_of("full", queued=100)]
    for tie_break in range(4):
        request = PlacementRequest(num_prompt_tokens=64, tie_break=tie_break)
        assert choose(views, request).engine_ids[0] == "full"


def test_a_stuck_engine_whose_report_says_idle_stops_drawing_requests() -> None:
    # It never finishes anything, so what this router has sent there stays assigned.
    views = [view_of("stuck", matched=10), view_of("b"), view_of("c")]
    assigned: Counter[EngineId] = Counter()
    sent: Counter[EngineId] = Counter()
    for number in range(300):
        decision = choose(
            views,
            PlacementRequest(num_prompt_tokens=320, tie_break=number, assigned_tokens=assigned),
        )
        first = decision.ranking[0]
        sent[first.engine_id] += 1
        if first.engine_id == "stuck":
            assigned[first.engine_id] += 320 - 16 * first.num_matched_blocks
    assert sent[EngineId("stuck")] <= 10
    assert min(sent[EngineId("b")], sent[EngineId("c")]) > 140


def test_imbalance_is_bounded_under_skew() -> None:
    # All prompts share what one engine has; only their last 100 tokens differ.
    views = [view_of("hot", matched=100)] + [view_of(name) for name in "bcd"]
    settings = PlacementSettings(max_imbalance=2.0, imbalance_slack_s=1.0)
    queue: Counter[EngineId] = Counter()
    for number in range(400):
        request = PlacementRequest(
            num_prompt_tokens=1700, tie_break=number, assigned_tokens=dict(queue)
        )
        first = choose(views, request, settings).ranking[0]
        queue[first.engine_id] += 1700 - 16 * first.num_matched_blocks
        others = [queue[view.info.engine_id] for view in views[1:]]
        bound = 2.0 * sum(others) / 3 + 1.0 * RATE + 1700
        assert queue[EngineId("hot")] <= bound
    assert all(queue[view.info.engine_id] > 0 for view in views)


def test_an_overloaded_engine_comes_last_even_with_the_best_estimate() -> None:
    views = [view_of("a", matched=500, queued=3000), view_of("b"), view_of("c")]
    request = PlacementRequest(num_prompt_tokens=8000)
    decision = choose(views, request)
    assert estimates(decision)[EngineId("a")] < estimates(decision)[EngineId("b")]
    assert decision.engine_ids[-1] == "a"
    assert decision.ranking[-1].is_overloaded
    relaxed = PlacementSettings(imbalance_slack_s=10.0)
    assert choose(views, request, relaxed).engine_ids[0] == "a"
    # Alone, it is still an answer.
    assert choose(views[:1], request).engine_ids == ("a",)


def test_a_burst_of_siblings_stays_together_before_any_event() -> None:
    views = [view_of(name) for name in "abcd"]
    predicted = PredictedPlacements(life_s=4.0)

    def place(number: int, now_s: float) -> EngineId:
        runs = predicted.longest_runs(KEYS, now_s)
        request = PlacementRequest(num_prompt_tokens=1605, tie_break=number, predicted_blocks=runs)
        engine_id = choose(views, request).engine_ids[0]
        predicted.add(engine_id, KEYS, now_s)
        return engine_id

    assert {place(number, 0.01 * number) for number in range(8)} == {"a"}
    # Long after, nothing is left of the prediction; by then the engine's events have told.
    assert predicted.longest_runs(KEYS, 10.0) == {}
    assert predicted.num_keys == 0


def test_the_larger_overlap_wins() -> None:
    views = [view_of("a", matched=30), view_of("b", matched=5)]
    request = PlacementRequest(
        num_prompt_tokens=1600, predicted_blocks={EngineId("a"): 10, EngineId("b"): 20}
    )
    decision = choose(views, request)
    assert [ranked.num_matched_blocks for ranked in decision.ranking] == [30, 20]


def test_predictions_are_apart_by_engine_and_bounded() -> None:
    predicted = PredictedPlacements(life_s=4.0, max_keys=250)
    a, b = EngineId("a"), EngineId("b")
    predicted.add(a, KEYS[:40], 0.0)
    predicted.add(a, KEYS[:10], 1.0)
    predicted.add(b, KEYS[:25], 1.0)
    assert predicted.longest_runs(KEYS, 1.0) == {a: 40, b: 25}
    assert predicted.longest_runs(KEYS[20:], 1.0) == {a: 20, b: 5}
    # The first has gone, and with it the keys that only it had.
    assert predicted.longest_runs(KEYS, 4.5) == {a: 10, b: 25}
    predicted.drop(b)
    assert predicted.longest_runs(KEYS, 4.5) == {a: 10}
    for number in range(5):
        predicted.add(EngineId(f"e{number}"), KEYS, 4.6)
        assert predicted.num_keys <= 250
    assert predicted.longest_runs(KEYS, 4.6) == {EngineId("e3"): 100, EngineId("e4"): 100}


def test_pages_are_pulled_when_that_is_quicker_than_computing() -> None:
    busy = view_of("busy", matched=90, queued=9000, can_move_pages=True)
    idle = view_of("idle", matched=10, pull_rate=BLOCK_BYTES * 1000.0, can_move_pages=True)
    request = PlacementRequest(num_prompt_tokens=1600)
    decision = choose([busy, idle], request, PlacementSettings(pull_latency_s=0.02))
    assert decision.engine_ids == ("idle", "busy")
    assert decision.ranking[0].estimate_s == pytest.approx(0.02 + 80 / 1000 + 160 / RATE)
    assert decision.pull is not None
    assert decision.pull.source == busy.info
    assert (decision.pull.first_block, decision.pull.num_blocks) == (10, 80)


@pytest.mark.parametrize(
    ("source", "destination"),
    [
        (view_of("s", matched=90, queued=9000), view_of("d", can_move_pages=True)),
        (view_of("s", matched=90, queued=9000, can_move_pages=True), view_of("d")),
        (
            view_of("s", matched=90, queued=9000, can_move_pages=True),
            view_of("d", can_move_pages=True, pull_rate=1000.0),
        ),
        (
            view_of("s", matched=90, queued=9000, can_move_pages=True, root_key=b"x" * 32),
            view_of("d", can_move_pages=True),
        ),
        (
            view_of("s", matched=9, queued=9000, can_move_pages=True),
            view_of("d", matched=9, can_move_pages=True),
        ),
    ],
    ids=["source without endpoint", "no endpoint", "slow link", "other root", "nothing more"],
)
def test_nothing_is_pulled_where_it_cannot_be_or_does_not_pay(
    source: EngineView, destination: EngineView
) -> None:
    decision = choose([source, destination], PlacementRequest(num_prompt_tokens=1600))
    assert decision.engine_ids[0] == "d"
    assert decision.pull is None


def test_the_best_holder_pulls_from_the_second_best_never_from_itself() -> None:
    views = [view_of("a", matched=90, can_move_pages=True)]
    decision = choose(views, PlacementRequest(num_prompt_tokens=1600))
    assert decision.pull is None


def test_a_session_stays_unless_that_is_clearly_worse() -> None:
    settings = PlacementSettings(affinity_factor=1.5, affinity_slack_s=0.0)
    request = PlacementRequest(num_prompt_tokens=1000, preferred=EngineId("a"))
    assert choose([view_of("a", queued=400), view_of("b")], request, settings).engine_ids == (
        "a",
        "b",
    )
    assert choose([view_of("a", queued=600), view_of("b")], request, settings).engine_ids == (
        "b",
        "a",
    )
    overloaded = [view_of("a", queued=1100, matched=500), view_of("b")]
    assert choose(overloaded, request, settings).engine_ids[0] == "b"


def test_engines_that_only_decode_are_the_last_resort() -> None:
    decode = view_of("a", role="decode")
    request = PlacementRequest(num_prompt_tokens=10)
    assert choose([decode, view_of("b", queued=900)], request).engine_ids == ("b",)
    assert choose([decode], request).engine_ids == ("a",)


numbers = st.integers(-10, 2**40)
rates = st.floats() | st.just(0.0)


@settings(deadline=None)
@given(data=st.data())
def test_odd_reports_never_raise(data: st.DataObject) -> None:
    views = [
        EngineView(
            info=view_of(
                data.draw(st.sampled_from("abc")),
                can_move_pages=data.draw(st.booleans()),
                role=data.draw(st.sampled_from(["both", "prefill", "decode"])),
            ).info,
            load=EngineLoad(
                num_running=data.draw(numbers),
                num_waiting=data.draw(numbers),
                num_queued_tokens=data.draw(numbers),
                prefill_tokens_per_s=data.draw(rates),
                pull_bytes_per_s=data.draw(rates),
            ),
            num_matched_blocks=data.draw(numbers),
        )
        for _ in range(data.draw(st.integers(0, 4)))
    ]
    assigned = {EngineId("a"): data.draw(numbers), EngineId("z"): 3}
    request = PlacementRequest(
        num_prompt_tokens=data.draw(numbers),
        tie_break=data.draw(st.integers()),
        preferred=data.draw(st.sampled_from([None, EngineId("a"), EngineId("z")])),
        assigned_tokens=assigned,
        predicted_blocks={EngineId("b"): data.draw(numbers)},
    )
    decision = choose(views, request)
    assert bool(decision.ranking) == bool(views)
    assert set(decision.engine_ids) <= {view.info.engine_id for view in views}
    assert len(power_of_two(views, assigned, (7, 9)).ranking) == len(views)
    assert len(least_loaded(views, assigned, request.tie_break).ranking) == len(views)


def test_plain_policies() -> None:
    views = [view_of("c", queued=5), view_of("a", queued=9), view_of("b", queued=5, running=1)]
    assert [round_robin(views, turn).engine_ids[0] for turn in range(4)] == ["a", "b", "c", "a"]
    assert least_loaded(views, {}, 0).engine_ids == ("c", "b", "a")
    assert least_loaded(views, {EngineId("c"): 10}, 0).engine_ids == ("b", "a", "c")
    pairs = {power_of_two(views, {}, (i, j)).engine_ids[:2] for i in range(3) for j in range(2)}
    assert pairs == {("b", "a"), ("c", "a"), ("c", "b")}
    assert power_of_two(views[:1], {}, (8, 8)).engine_ids == ("c",)
