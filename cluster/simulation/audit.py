"""What must hold once faults are over and all is quiet."""

from collections.abc import Iterator

from pageray.cluster.coordinator.block_table import hint_of
from pageray.cluster.simulation.engine import SimulatedEngine
from pageray.cluster.simulation.simulation import Simulation


def audit(simulation: Simulation) -> list[str]:
    """Every complaint as a line; none if all is well. Invariants of the parts raise by themselves."""
    coordinator = simulation.port.coordinator
    coordinator.check_invariants()
    complaints = list(_requests(simulation))
    known = {info.engine_id: info.epoch for info in coordinator.engines}
    living = {engine_id: engine.info.epoch for engine_id, engine in simulation.engines.items()}
    if known != living:
        complaints.append(f"the coordinator knows {known}, but {living} live")
    for engine_id, engine in simulation.engines.items():
        engine.check_invariants()
        complaints += _left_over(engine)
        if engine_id not in known:
            continue
        said = coordinator.blocks_held(engine_id)
        held = set(map(hint_of, engine.pool.published_keys()))
        if said != held:
            complaints.append(
                f"{engine_id} holds {len(held)} blocks; the coordinator knows {len(said & held)} "
                f"of them, and {len(said - held)} others"
            )
    return complaints


def _requests(simulation: Simulation) -> Iterator[str]:
    for run in simulation.result.runs:
        if run.num_finishes != 1:
            yield f"request {run.number} has finished {run.num_finishes} times"


def _left_over(engine: SimulatedEngine) -> Iterator[str]:
    name = engine.info.engine_id
    counts = {
        "requests": int(engine.scheduler.has_requests),
        "held blocks": engine.pool.num_held,
        "imports": len(engine.imports),
        "exports": len(engine.exports),
        "pushes": len(engine.pushes),
    }
    for what, count in counts.items():
        if count:
            yield f"{name} has {count} {what} left"
