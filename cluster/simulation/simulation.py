"""One run: a policy, a cluster, arrivals, faults; and what came of them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pageray.cluster.block_keys import root_key
from pageray.cluster.coordinator.messages import Endpoint, EngineInfo
from pageray.cluster.ids import EngineId, Epoch
from pageray.cluster.simulation.coordinator_port import CoordinatorPort
from pageray.cluster.simulation.cost_model import CostModel
from pageray.cluster.simulation.engine import EngineSettings, EngineWorld, SimulatedEngine
from pageray.cluster.simulation.event_loop import EventLoop, Scope
from pageray.cluster.simulation.faults import FaultDice, FaultPlan
from pageray.cluster.simulation.policies import POLICIES
from pageray.cluster.simulation.randomness import Rng
from pageray.cluster.simulation.request_run import RequestRun
from pageray.cluster.simulation.router import SimulatedRouter
from pageray.cluster.simulation.uniform_blocks import UniformBlockHasher
from pageray.cluster.simulation.workload import Arrival

QUIET_S = 15.0
"""After the last fault and the last request: longer than a heartbeat may be missing."""
WARM_UP_S = 1.0
"""Engines register before the first request arrives."""


@dataclass(frozen=True, kw_only=True)
class SimulationSettings:
    num_engines: int
    policy: str
    """A key of `POLICIES`."""
    engine: EngineSettings = field(default_factory=EngineSettings)
    cost: CostModel = field(default_factory=CostModel)
    faults: FaultPlan = field(default_factory=FaultPlan)


@dataclass(slots=True)
class EngineTally:
    """What engines of one id have done, those that died included."""

    num_computed_tokens: int = 0
    num_prompt_tokens: int = 0
    num_preemptions: int = 0
    num_pulled_bytes: int = 0
    num_failed_pulls: int = 0

    def add(self, engine: SimulatedEngine) -> None:
        self.num_computed_tokens += engine.scheduler.stats.num_computed_tokens
        self.num_prompt_tokens += engine.ranks.num_prompt_tokens
        self.num_preemptions += engine.scheduler.stats.num_preemptions
        self.num_pulled_bytes += engine.puller.counters.num_bytes
        self.num_failed_pulls += engine.puller.counters.num_failed_pulls


@dataclass(slots=True)
class FaultTally:
    num_engine_deaths: int = 0
    num_coordinator_deaths: int = 0


@dataclass(slots=True)
class SimulationResult:
    runs: list[RequestRun]
    tallies: dict[EngineId, EngineTally]
    faults: FaultTally = field(default_factory=FaultTally)


class Simulation:
    """Used once: `run`, then look at it."""

    def __init__(self, settings: SimulationSettings, rng: Rng) -> None:
        self.settings = settings
        self.loop = EventLoop()
        self._rng = rng
        self._scope = Scope()
        self._dice = FaultDice(settings.faults, rng)
        self.port = CoordinatorPort(self.loop, self._dice, self._scope)
        self.root = root_key("simulated", "bfloat16", settings.engine.block_size)
        policy = POLICIES[settings.policy]
        self._can_move = policy.can_move
        self.engines: dict[EngineId, SimulatedEngine] = {}
        """Those that live."""
        self._epochs: dict[EngineId, int] = {}
        self.result = SimulationResult(runs=[], tallies={})
        hasher = UniformBlockHasher(self.root, settings.engine.block_size)
        self._world = EngineWorld(
            loop=self.loop,
            port=self.port,
            peers=self.engines.get,
            dice=self._dice,
            hasher=hasher,
            cost=settings.cost,
            settings=settings.engine,
        )
        self._router = SimulatedRouter(
            self._world,
            self.root,
            place=policy.make(rng),
            rng=rng,
            engines=self.engines,
        )
        for number in range(settings.num_engines):
            self._start(EngineId(f"engine-{number:04d}"))

    def run(
        self, arrivals: Iterable[Arrival], on_finished: Callable[[], object] = lambda: None
    ) -> SimulationResult:
        """All requests, and the time it takes until nothing is under way any more."""
        num_open = 0
        has_all = False
        loop, plan = self.loop, self.settings.faults

        def finished() -> None:
            nonlocal num_open
            num_open -= 1
            on_finished()

        async def admit() -> None:
            nonlocal num_open, has_all
            for number, arrival in enumerate(arrivals):
                await loop.sleep(WARM_UP_S + arrival.time_s - loop.now_s)
                num_open += 1
                run = RequestRun(number, arrival, self.settings.engine.block_size)
                run.arrived_s = loop.now_s
                self.result.runs.append(run)
                loop.spawn(self._router.see_through(run, finished), self._scope)
            has_all = True

        for fault in (self._kill_engines(), self._kill_coordinators()):
            loop.spawn(fault, self._scope)
        loop.spawn(admit(), self._scope)
        loop.run_until(lambda: has_all and not num_open and loop.now_s >= plan.last_effect_s)
        if plan != FaultPlan():
            end_s = loop.now_s + QUIET_S
            loop.run_until(lambda: loop.now_s >= end_s)
        for engine_id, engine in self.engines.items():
            self.result.tallies[engine_id].add(engine)
        return self.result

    def _start(self, engine_id: EngineId) -> None:
        epoch = self._epochs[engine_id] = self._epochs.get(engine_id, 0) + 1
        self.result.tallies.setdefault(engine_id, EngineTally())
        endpoint = Endpoint(control_address="-", data_address="-", host_id=engine_id, pid=1)
        settings = self.settings
        info = EngineInfo(
            engine_id=engine_id,
            epoch=Epoch(epoch),
            root_key=self.root,
            block_size=settings.engine.block_size,
            num_blocks=settings.engine.num_blocks,
            layout=settings.cost.layout(settings.engine.block_size),
            endpoint=endpoint if self._can_move else None,
        )
        # Not all at one time.
        first_wait_s = self._rng.uniform(0.0, WARM_UP_S / 2)
        self.engines[engine_id] = SimulatedEngine(self._world, info, first_wait_s)

    async def _kill_engines(self) -> None:
        plan, rng, loop = self.settings.faults, self._rng, self.loop
        while plan.deaths_per_s > 0.0:
            await loop.sleep(rng.expovariate(plan.deaths_per_s))
            if loop.now_s >= plan.until_s:
                return
            if len(self.engines) < 2:
                continue
            engine_id = list(self.engines)[rng.randrange(len(self.engines))]
            dead = self.engines.pop(engine_id)
            dead.die()
            self.result.tallies[engine_id].add(dead)
            self.result.faults.num_engine_deaths += 1
            if not self._dice.is_gone(loop.now_s):
                loop.after(
                    rng.uniform(0.0, plan.max_restart_s),
                    lambda engine_id=engine_id: self._start(engine_id),
                )

    async def _kill_coordinators(self) -> None:
        plan, rng, loop = self.settings.faults, self._rng, self.loop
        while plan.coordinator_deaths_per_s > 0.0:
            await loop.sleep(rng.expovariate(plan.coordinator_deaths_per_s))
            if loop.now_s >= plan.until_s:
                return
            self.port.restart(rng.uniform(0.0, plan.max_coordinator_down_s))
            self.result.faults.num_coordinator_deaths += 1
