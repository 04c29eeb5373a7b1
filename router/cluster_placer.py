"""Route or move: which engine a request should go to, and whether it should bring pages along."""

import asyncio
import logging
import random
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Protocol

from pageray.cluster.block_keys import BlockContent, BlockHasher
from pageray.cluster.coordinator.errors import CoordinatorUnavailableError
from pageray.cluster.coordinator.messages import EngineInfo, EngineView, Location
from pageray.cluster.generation import GenerateRequest
from pageray.cluster.ids import BlockKey, EngineId
from pageray.cluster.placement import Decision, PlacementRequest, choose
from pageray.cluster.predicted_placements import PredictedPlacements
from pageray.router.replica_board import ReplicaBoard
from pageray.router.wire import ModelFacts

logger = logging.getLogger(__name__)

LOOKUP_TIMEOUT_S = 0.1
"""The coordinator answers in about a millisecond, or is restarting."""
SILENCE_S = 1.0
"""After a lookup that failed, requests are placed without one for so long."""
REPORT_AGE_S = 0.6
"""An engine's report of its queue is at most so old: what was sent before is in it."""
MAX_SESSIONS = 10_000

Policy = Callable[[tuple[EngineView, ...], PlacementRequest], Decision]


class PrefixLookup(Protocol):
    """The part of the coordinator that routers ask."""

    async def locate(self, root_key: BlockKey, keys: tuple[BlockKey, ...]) -> Location: ...


class ClusterAssignment:
    """One attempt of one request, counted as load of its engine until its first token."""

    def __init__(
        self, placer: "ClusterPlacer", decision: Decision, keys: tuple[BlockKey, ...], session: str
    ) -> None:
        self._placer = placer
        self._keys = keys
        self._session = session
        self._engine_id: EngineId | None = None
        self.ranking = decision.engine_ids
        self.pull_from: EngineInfo | None = None
        self.pull_num_blocks = 0
        if decision.pull is not None:
            self.pull_from = decision.pull.source
            self.pull_num_blocks = decision.pull.first_block + decision.pull.num_blocks
        self.num_tokens = 0
        self.since_s = asyncio.get_running_loop().time()

    def accepted_by(self, engine_id: EngineId) -> None:
        if self._engine_id is None:
            self._engine_id = engine_id
            self._placer.was_accepted(engine_id, self._keys, self._session)

    def first_token(self) -> None:
        self.close()

    def close(self) -> None:
        self._placer.is_done(self)


class ClusterPlacer:
    """For one event loop. Never raises and never waits longer than `LOOKUP_TIMEOUT_S`."""

    def __init__(
        self,
        lookup: PrefixLookup,
        facts: Callable[[], Awaitable[ModelFacts]],
        board: ReplicaBoard,
        policy: Policy = choose,
    ) -> None:
        self._lookup = lookup
        self._facts = facts
        self._board = board
        self._policy = policy
        self._predicted = PredictedPlacements()
        self._open: set[ClusterAssignment] = set()
        self._sessions: OrderedDict[str, EngineId] = OrderedDict()
        self._silent_until_s = 0.0

    async def place(self, request: GenerateRequest) -> ClusterAssignment:
        """See `resuming.Placer`."""
        facts = await self._facts()
        contents: list[BlockContent] = []
        hasher = BlockHasher(facts.root_key, facts.block_size)
        hasher.extend(contents, request.known_token_ids[:-1], request.cache_salt)
        keys = tuple(content.key for content in contents)
        decision = self._decide(request, keys, await self._locate(facts.root_key, keys))
        assignment = ClusterAssignment(self, decision, keys, request.session_id)
        if decision.ranking:
            num_matched = decision.ranking[0].num_matched_blocks
            if decision.pull is not None:
                num_matched += decision.pull.num_blocks
            num_lacking = len(request.prompt_token_ids) - num_matched * facts.block_size
            assignment.num_tokens = max(1, num_lacking)
            self._open.add(assignment)
            # Before it is accepted: siblings may be right behind.
            self._predicted.add(decision.ranking[0].engine_id, keys, assignment.since_s)
        return assignment

    def was_accepted(self, engine_id: EngineId, keys: tuple[BlockKey, ...], session: str) -> None:
        if session:
            self._sessions[session] = engine_id
            self._sessions.move_to_end(session)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)

    def is_done(self, assignment: ClusterAssignment) -> None:
        self._open.discard(assignment)

    def _decide(
        self, request: GenerateRequest, keys: tuple[BlockKey, ...], location: Location | None
    ) -> Decision:
        if location is None:
            return Decision(ranking=())
        live = self._board.live
        views = tuple(view for view in location.engines if not live or view.info.engine_id in live)
        now_s = asyncio.get_running_loop().time()
        return self._policy(
            views,
            PlacementRequest(
                num_prompt_tokens=len(request.prompt_token_ids),
                tie_break=random.getrandbits(16),
                preferred=self._sessions.get(request.session_id),
                assigned_tokens=self._assigned_tokens(now_s),
                predicted_blocks=self._predicted.longest_runs(keys, now_s),
            ),
        )

    def _assigned_tokens(self, now_s: float) -> dict[EngineId, int]:
        assigned: dict[EngineId, int] = {}
        for each in self._open:
            if each.since_s > now_s - REPORT_AGE_S:
                engine_id = each.ranking[0]
                assigned[engine_id] = assigned.get(engine_id, 0) + each.num_tokens
        return assigned

    async def _locate(self, root_key: BlockKey, keys: tuple[BlockKey, ...]) -> Location | None:
        loop = asyncio.get_running_loop()
        if loop.time() < self._silent_until_s:
            return None
        try:
            async with asyncio.timeout(LOOKUP_TIMEOUT_S):
                return await self._lookup.locate(root_key, keys)
        except (CoordinatorUnavailableError, TimeoutError) as error:
            logger.info("placing by load alone: %s", error)
            self._silent_until_s = loop.time() + SILENCE_S
            return None
