"""Places requests and sees them through: `ClusterPlacer` and `Resuming` in simulated time."""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from pageray.cluster.block_keys import BlockContent
from pageray.cluster.coordinator.coordinator import Coordinator
from pageray.cluster.coordinator.errors import CoordinatorUnavailableError
from pageray.cluster.coordinator.messages import Location
from pageray.cluster.errors import EngineDeadError
from pageray.cluster.generation import GenerateRequest, RequestOutput
from pageray.cluster.ids import BlockKey, EngineId
from pageray.cluster.placement import Decision, PlacementRequest
from pageray.cluster.predicted_placements import PredictedPlacements
from pageray.cluster.simulation.engine import EngineWorld, SimulatedEngine
from pageray.cluster.simulation.policies import Place
from pageray.cluster.simulation.randomness import Rng
from pageray.cluster.simulation.request_run import RequestRun

LOOKUP_TIMEOUT_S = 0.1
SILENCE_S = 1.0
REPORT_AGE_S = 0.6
SUSPICION_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0


@dataclass(slots=True, eq=False)
class _Assignment:
    engine_id: EngineId
    num_tokens: int
    since_s: float


class SimulatedRouter:
    """`engines` are those whose processes live, as Serve knows them."""

    def __init__(
        self,
        world: EngineWorld,
        root: BlockKey,
        *,
        place: Place,
        rng: Rng,
        engines: dict[EngineId, SimulatedEngine],
    ) -> None:
        self._loop = world.loop
        self._port = world.port
        self._hasher = world.hasher
        self._root = root
        self._block_size = world.settings.block_size
        self._place = place
        self._rng = rng
        self._engines = engines
        self._predicted = PredictedPlacements()
        self._open: dict[_Assignment, None] = {}
        self._silent_until_s = 0.0
        self._failed_s: dict[EngineId, float] = {}

    async def see_through(self, run: RequestRun, on_finished: Callable[[], None]) -> None:
        """Until the request is finished, on however many engines."""
        pause_s = _FIRST_PAUSE_S
        while not run.is_finished:
            request = run.next_attempt()
            keys = self._keys_of(request)
            decision = await self._decide(request, keys)
            engine_id = self._first_of(decision)
            if engine_id is not None:
                num_seen = run.num_attempts
                try:
                    await self._attempt(run, request, keys, decision, engine_id)
                except EngineDeadError:
                    assert run.num_attempts == num_seen
                    self._failed_s[engine_id] = self._loop.now_s
            if not run.is_finished:
                await self._loop.sleep(pause_s)
                pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
        on_finished()

    async def _attempt(
        self,
        run: RequestRun,
        request: GenerateRequest,
        keys: tuple[BlockKey, ...],
        decision: Decision,
        engine_id: EngineId,
    ) -> None:
        assignment = self._assign(request, keys, decision, engine_id)
        if decision.pull is not None and decision.engine_ids[0] == engine_id:
            plan = decision.pull
            request = msgspec.structs.replace(
                request,
                pull_from=plan.source,
                pull_num_blocks=plan.first_block + plan.num_blocks,
            )

        def take(output: RequestOutput) -> None:
            self._open.pop(assignment, None)
            run.accept(output, self._loop.now_s)

        try:
            await self._engines[engine_id].serve(request, take)
        finally:
            self._open.pop(assignment, None)

    def _assign(
        self,
        request: GenerateRequest,
        keys: tuple[BlockKey, ...],
        decision: Decision,
        engine_id: EngineId,
    ) -> _Assignment:
        matched = next(
            (r.num_matched_blocks for r in decision.ranking if r.engine_id == engine_id), 0
        )
        if decision.pull is not None and decision.engine_ids[0] == engine_id:
            matched += decision.pull.num_blocks
        num_tokens = len(request.prompt_token_ids) - matched * self._block_size
        assignment = _Assignment(engine_id, max(1, num_tokens), self._loop.now_s)
        self._open[assignment] = None
        self._predicted.add(engine_id, keys, self._loop.now_s)
        return assignment

    def _keys_of(self, request: GenerateRequest) -> tuple[BlockKey, ...]:
        contents: list[BlockContent] = []
        self._hasher.extend(contents, request.known_token_ids[:-1], request.cache_salt)
        return tuple(content.key for content in contents)

    async def _decide(self, request: GenerateRequest, keys: tuple[BlockKey, ...]) -> Decision:
        location = await self._locate(keys)
        if location is None:
            return Decision(ranking=())
        views = tuple(view for view in location.engines if view.info.engine_id in self._engines)
        now_s = self._loop.now_s
        return self._place(
            views,
            PlacementRequest(
                num_prompt_tokens=len(request.prompt_token_ids),
                tie_break=self._rng.getrandbits(16),
                assigned_tokens=self._assigned_tokens(now_s),
                predicted_blocks=self._predicted.longest_runs(keys, now_s),
            ),
        )

    def _first_of(self, decision: Decision) -> EngineId | None:
        """The best engine that has not just failed; by chance where nothing is known."""
        now_s = self._loop.now_s
        live = [
            engine_id
            for engine_id in self._engines
            if now_s - self._failed_s.get(engine_id, -SUSPICION_S) >= SUSPICION_S
        ] or list(self._engines)
        for engine_id in decision.engine_ids:
            if engine_id in live:
                return engine_id
        return live[self._rng.randrange(len(live))] if live else None

    def _assigned_tokens(self, now_s: float) -> dict[EngineId, int]:
        assigned: dict[EngineId, int] = {}
        for each in self._open:
            if each.since_s > now_s - REPORT_AGE_S:
                assigned[each.engine_id] = assigned.get(each.engine_id, 0) + each.num_tokens
        return assigned

    async def _locate(self, keys: tuple[BlockKey, ...]) -> Location | None:
        if self._loop.now_s < self._silent_until_s:
            return None

        def ask(coordinator: Coordinator, now_s: float) -> Location:
            return coordinator.locate(self._root, keys, now_s)

        try:
            return await self._port.call(ask, LOOKUP_TIMEOUT_S)
        except CoordinatorUnavailableError:
            self._silent_until_s = self._loop.now_s + SILENCE_S
            return None
