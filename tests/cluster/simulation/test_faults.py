"""Whatever went wrong, once it is over the cluster is whole again and every request was answered."""

import random
from dataclasses import replace

import pytest

from pageray.cluster.block_keys import BlockContent
from pageray.cluster.ids import BlockKey, EngineId, Epoch, TransferId
from pageray.cluster.simulation.audit import audit
from pageray.cluster.simulation.cost_model import CostModel
from pageray.cluster.simulation.engine import EngineSettings
from pageray.cluster.simulation.faults import FaultPlan
from pageray.cluster.simulation.simulation import Simulation, SimulationSettings
from pageray.cluster.simulation.workload import Arrival, SharedPrefixLoad, shared_prefix_arrivals

SMALL = EngineSettings(
    block_size=16, num_blocks=120, max_num_batched_tokens=256, max_num_seqs=16, max_model_len=1024
)
"""Little room, so that blocks are evicted and sequences preempted."""
SLOW = CostModel(prefill_token_s=1e-3)
"""So that pulling pages is worth it."""

ALL_FAULTS = FaultPlan(
    until_s=12.0,
    lost_share=0.05,
    late_share=0.05,
    repeated_share=0.1,
    deaths_per_s=0.4,
    max_restart_s=6.0,
    coordinator_deaths_per_s=0.15,
    max_coordinator_down_s=2.0,
    failed_pull_share=0.1,
    cut_pull_share=0.2,
)


def make_load(num_requests: int, requests_per_s: float, seed: int) -> list[Arrival]:
    load = SharedPrefixLoad(
        num_requests=num_requests,
        requests_per_s=requests_per_s,
        num_groups=20,
        num_prefix_blocks=24,
        num_output_tokens=12,
    )
    return list(shared_prefix_arrivals(load, SMALL.block_size, random.Random(f"load {seed}")))


def make_simulation(num_engines: int, faults: FaultPlan, seed: int) -> Simulation:
    """Odd seeds leave it to the engines to look for pages, even ones to the router."""
    settings = SimulationSettings(
        num_engines=num_engines,
        policy="move-only" if seed % 2 else "ours",
        engine=SMALL,
        cost=SLOW,
        faults=faults,
    )
    return Simulation(settings, random.Random(seed))


@pytest.mark.parametrize("seed", range(8))
def test_after_all_faults_the_cluster_is_whole_again(seed: int) -> None:
    simulation = make_simulation(4, ALL_FAULTS, seed)
    result = simulation.run(make_load(160, 14.0, seed))
    assert audit(simulation) == []
    assert len(result.runs) == 160


def test_sixty_four_engines_survive_too() -> None:
    faults = replace(ALL_FAULTS, until_s=4.0, deaths_per_s=6.0)
    simulation = make_simulation(64, faults, 1)
    result = simulation.run(make_load(600, 150.0, 1))
    assert audit(simulation) == []
    assert result.faults.num_engine_deaths > 10
    assert any(run.num_attempts > 1 for run in result.runs)


def test_the_faults_happen() -> None:
    """Or the tests above would show nothing."""
    simulation = make_simulation(4, ALL_FAULTS, 3)
    result = simulation.run(make_load(160, 14.0, 3))
    assert result.faults.num_engine_deaths > 0
    assert result.faults.num_coordinator_deaths > 0
    assert any(run.num_attempts > 1 for run in result.runs)
    assert sum(tally.num_failed_pulls for tally in result.tallies.values()) > 0
    assert sum(tally.num_pulled_bytes for tally in result.tallies.values()) > 0


@pytest.mark.parametrize(
    "faults",
    [
        FaultPlan(until_s=8.0, lost_share=0.3, late_share=0.2, repeated_share=0.3),
        FaultPlan(until_s=8.0, failed_pull_share=0.4, cut_pull_share=0.5),
        FaultPlan(until_s=8.0, deaths_per_s=1.0, max_restart_s=12.0),
        FaultPlan(until_s=8.0, coordinator_deaths_per_s=1.0),
        FaultPlan(until_s=8.0, deaths_per_s=0.5, gone_share=0.6),
        FaultPlan(
            until_s=20.0, late_share=0.6, repeated_share=0.6, deaths_per_s=2.0, max_restart_s=0.5
        ),
    ],
    ids=["messages", "pulls", "engines", "coordinator", "gone", "ghosts"],
)
def test_each_kind_of_fault_alone(faults: FaultPlan) -> None:
    """Ghosts: what an engine said under its last epoch comes after it is back."""
    simulation = make_simulation(4, faults, 5)
    result = simulation.run(make_load(80, 8.0, 5))
    assert (len(simulation.engines) < 4) == (faults.gone_share > 0.0)
    assert (result.faults.num_engine_deaths > 0) == (faults.deaths_per_s > 0.0)
    assert audit(simulation) == []


def test_the_audit_notices() -> None:
    simulation = make_simulation(2, FaultPlan(), 0)
    simulation.run(make_load(10, 10.0, 0))
    loop, coordinator = simulation.loop, simulation.port.coordinator
    engine = simulation.engines[EngineId("engine-0000")]

    def complaints_after(wait_s: float) -> list[str]:
        end_s = loop.now_s + wait_s
        loop.run_until(lambda: loop.now_s >= end_s)
        return audit(simulation)

    # What was published last is reported within a second, and so is what is gone.
    assert complaints_after(1.0) == []
    engine.scheduler.clear_prefix_cache()
    assert any("holds 0 blocks" in complaint for complaint in audit(simulation))
    assert complaints_after(1.0) == []

    coordinator.deregister(engine.info.engine_id, Epoch(1))
    assert any("live" in complaint for complaint in audit(simulation))
    assert complaints_after(2.0) == []

    content = BlockContent(BlockKey(b"k" * 32), b"tokens")
    assert engine.imports.begin(TransferId(99), [content], 1) is not None
    assert len(audit(simulation)) == 2  # an import, and the block it holds
    engine.imports.finish(TransferId(99), 0)
    assert audit(simulation) == []

    simulation.result.runs[3].num_finishes = 2
    assert audit(simulation) == ["request 3 has finished 2 times"]


def test_equal_seeds_give_equal_runs_with_faults_too() -> None:
    def times(seed: int) -> list[tuple[float | None, int]]:
        result = make_simulation(4, ALL_FAULTS, seed).run(make_load(60, 10.0, 0))
        return [(run.first_token_s, run.num_attempts) for run in result.runs]

    assert times(4) == times(4)
    assert times(4) != times(6)
