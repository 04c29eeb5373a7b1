"""The stream of a request over as many engines as it takes."""

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Callable
from typing import Protocol

import msgspec

from pageray.cluster.coordinator.messages import EngineInfo
from pageray.cluster.errors import CapacityError, EngineDeadError, PageRayError
from pageray.cluster.generation import GenerateRequest, RequestOutput
from pageray.cluster.ids import EngineId
from pageray.cluster.rebalance import Move
from pageray.router.attempt import Attempt
from pageray.router.failure_memory import FailureMemory
from pageray.router.replica_board import ReplicaBoard
from pageray.router.resumable_request import ResumableRequest
from pageray.router.wire import encode_request

logger = logging.getLogger(__name__)

PATIENCE_S = 90.0
"""About as long as it takes to start an engine on a busy machine, twice."""
MAX_MOVES = 4
"""A request that has left so many replicas stays to the end: the board may be wrong about one that
Serve still routes to, and it must not wander for ever."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_RETRY_AFTER_S = 5.0

OpenFrames = Callable[[bytes, tuple[EngineId, ...]], AsyncGenerator[bytes, None]]
"""(encoded request, engines in order of preference) -> the frames of whoever takes it."""


class Assignment(Protocol):
    """Where a request should run, and the load it is counted as until `close`."""

    @property
    def ranking(self) -> tuple[EngineId, ...]:
        """Best first; empty: anywhere."""
        ...

    @property
    def pull_from(self) -> EngineInfo | None: ...
    @property
    def pull_num_blocks(self) -> int:
        """See `GenerateRequest`."""
        ...

    def accepted_by(self, engine_id: EngineId) -> None: ...

    def first_token(self) -> None: ...

    def close(self) -> None: ...


class Placer(Protocol):
    async def place(self, request: GenerateRequest) -> Assignment:
        """Never raises and never takes long: without knowledge the ranking is empty."""
        ...


class Resuming:
    """Runs requests on engines until they are finished, for one model and event loop."""

    def __init__(
        self,
        open_frames: OpenFrames,
        placer: Placer,
        board: ReplicaBoard,
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`patience_s`: how long a request may go without a token while engines fail it."""
        self._open_frames = open_frames
        self._placer = placer
        self._board = board
        self._patience_s = patience_s
        self._failures = FailureMemory()
        self._attempts: dict[Attempt, None] = {}
        """Those under way, oldest first."""

    async def outputs(self, run: ResumableRequest) -> AsyncGenerator[RequestOutput, None]:
        """Every token once, whatever happens to engines meanwhile.

        An engine that dies costs the computation since its pages are gone; one that is being
        taken away is left, and its pages are pulled from it. Raises `ClientError` as the engine
        does, and `CapacityError` when no engine could go on for `patience_s`.
        """
        loop = asyncio.get_running_loop()
        progress_s = loop.time()
        pause_s = _FIRST_PAUSE_S
        left: Attempt | None = None
        num_moves = 0
        while not run.is_finished:
            request = run.next_attempt()
            assignment = await self._placer.place(request)
            ranking = self._ranking(assignment)
            request = msgspec.structs.replace(
                request,
                pull_from=assignment.pull_from,
                pull_num_blocks=assignment.pull_num_blocks,
            )
            if left is not None:
                ranking = ranking if left.target is None else (left.target, *ranking)
                if left.engine_info is not None:
                    request = msgspec.structs.replace(
                        request, pull_from=left.engine_info, pull_num_blocks=0
                    )
                left = None
            frames = self._open_frames(encode_request(request), ranking)
            attempt = Attempt(frames, self._board, may_leave=num_moves < MAX_MOVES)
            self._attempts[attempt] = None
            try:
                async with attempt:
                    async for output in attempt.outputs():
                        if attempt.engine_id is not None:
                            assignment.accepted_by(attempt.engine_id)
                        new = run.accept(output)
                        if new is not None:
                            progress_s, pause_s = loop.time(), _FIRST_PAUSE_S
                            assignment.first_token()
                            yield new
                if attempt.has_left:
                    left = attempt
                    num_moves += 1
                    logger.info("%s leaves %s", request.request_id, attempt.engine_id)
                elif not run.is_finished:
                    raise EngineDeadError("The engine ended the stream in mid-sequence.")
            except (CapacityError, EngineDeadError) as error:
                logger.warning("attempt %s failed: %s", request.request_id, error)
                if attempt.engine_id is not None:
                    self._failures.failed(attempt.engine_id, loop.time())
                if loop.time() - progress_s > self._patience_s:
                    raise _given_up(error, self._patience_s) from error
                await asyncio.sleep(pause_s)
                pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
            finally:
                assignment.close()
                del self._attempts[attempt]

    def move_one(self, move: Move) -> bool:
        """See `rebalancer.Streams`."""
        there = [
            attempt
            for attempt in reversed(self._attempts)
            if attempt.engine_id == move.giver and attempt.target is None
        ]
        there.sort(key=lambda attempt: attempt.has_output)
        if not there:
            return False
        there[0].leave_for(move.taker)
        return True

    def _ranking(self, assignment: Assignment) -> tuple[EngineId, ...]:
        """The order to try engines in; those that have just failed come last, unnamed."""
        suspects = self._failures.suspects(asyncio.get_running_loop().time())
        if not suspects:
            return assignment.ranking
        order = list(assignment.ranking) or random.sample(
            sorted(self._board.live), len(self._board.live)
        )
        return tuple(engine_id for engine_id in order if engine_id not in suspects)


def _given_up(error: PageRayError, patience_s: float) -> CapacityError:
    return CapacityError(
        f"For {patience_s:.0f} s no engine could go on with this request; the last said: {error} "
        "Try again later.",
        _RETRY_AFTER_S,
    )
