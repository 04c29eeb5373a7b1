"""Runs without faults: what must come out, whatever the policy."""

import random

import pytest

from pageray.cluster.simulation.policies import POLICIES
from pageray.cluster.simulation.simulation import (
    Simulation,
    SimulationResult,
    SimulationSettings,
)
from pageray.cluster.simulation.workload import (
    Arrival,
    SharedPrefixLoad,
    optimal_hit_tokens,
    shared_prefix_arrivals,
)

BLOCK = 512


def run(policy: str, num_engines: int, arrivals: list[Arrival]) -> SimulationResult:
    settings = SimulationSettings(num_engines=num_engines, policy=policy)
    return Simulation(settings, random.Random(0)).run(arrivals)


def make_load(num_requests: int) -> list[Arrival]:
    load = SharedPrefixLoad(
        num_requests=num_requests, requests_per_s=10.0, num_groups=30, num_output_tokens=4
    )
    return list(shared_prefix_arrivals(load, BLOCK, random.Random(0)))


def num_cached(result: SimulationResult) -> int:
    return sum(run.num_cached_tokens for run in result.runs)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_everything_and_none_beats_the_optimum(policy: str) -> None:
    arrivals = make_load(120)
    result = run(policy, 4, arrivals)
    assert [each.num_finishes for each in result.runs] == [1] * 120
    num_prompt = sum(each.num_prompt_tokens for each in arrivals)
    computed = sum(tally.num_prompt_tokens for tally in result.tallies.values())
    assert computed == num_prompt - num_cached(result)
    assert 0 < num_cached(result) <= optimal_hit_tokens(arrivals, BLOCK)
    moved = sum(tally.num_pulled_bytes for tally in result.tallies.values())
    assert POLICIES[policy].can_move or moved == 0


def test_where_prefixes_are_shared_ours_hits_more_than_load_alone() -> None:
    arrivals = make_load(120)
    ours = num_cached(run("ours", 8, arrivals))
    assert ours > 1.3 * num_cached(run("least-loaded", 8, arrivals))
    assert ours > 0.8 * optimal_hit_tokens(arrivals, BLOCK)


def test_one_engine_with_room_for_all_reaches_the_optimum() -> None:
    """One at a time: nothing is computed twice because it came at the same time."""
    arrivals = [
        Arrival(5.0 * number, each.block_tokens, each.num_prompt_tokens, 2)
        for number, each in enumerate(make_load(30))
    ]
    result = run("round-robin", 1, arrivals)
    assert num_cached(result) == optimal_hit_tokens(arrivals, BLOCK)


def test_the_time_to_the_first_token_is_what_the_cost_model_says() -> None:
    settings = SimulationSettings(num_engines=1, policy="round-robin")
    arrivals = [Arrival(0.0, (1, 2, 3, 4), 4 * BLOCK, 3)]
    [only] = Simulation(settings, random.Random(0)).run(arrivals).runs
    cost = settings.cost
    expected_s = cost.step_s + cost.chunk_s(0, 4 * BLOCK)
    assert only.first_token_s is not None
    # A lookup there and back, and the way to the engine.
    assert only.first_token_s - only.arrived_s == pytest.approx(expected_s + 0.0015)


def test_pages_move_when_their_holder_is_busy() -> None:
    """Twelve at once of a prefix that one engine holds, with long tails of their own."""
    prefix = tuple(range(60))
    arrivals = [Arrival(0.0, (*prefix, 100), 61 * BLOCK, 1)]
    arrivals += [
        Arrival(10.0, (*prefix, *range(start, start + 20)), 80 * BLOCK, 1)
        for start in range(1000, 13_000, 1000)
    ]
    ours, route_only = run("ours", 4, arrivals), run("route-only", 4, arrivals)
    block_bytes = SimulationSettings(num_engines=1, policy="ours").cost.layout(BLOCK).page_bytes(0)
    moved = sum(tally.num_pulled_bytes for tally in ours.tallies.values())
    assert moved >= 60 * block_bytes
    assert num_cached(ours) > 1.2 * num_cached(route_only)
