"""The stream of a request over as many engines as it takes."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Protocol

import msgspec

from pageray.cluster.coordinator.messages import EngineInfo
from pageray.cluster.errors import CapacityError, EngineDeadError, PageRayError
from pageray.cluster.generation import GenerateRequest, RequestOutput
from pageray.cluster.ids import EngineId
from pageray.router.attempt import Attempt
from pageray.router.replica_board import ReplicaBoard
from pageray.router.resumable_request import ResumableRequest
from pageray.router.wire import encode_request

logger = logging.getLogger(__name__)

MAX_FAILURES = 8
"""Engines that may fail a request one after the other, without a token in between."""
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

    def accepted_by(self, engine_id: EngineId) -> None: ...

    def first_token(self) -> None: ...

    def close(self) -> None: ...


class Placer(Protocol):
    async def place(self, request: GenerateRequest) -> Assignment:
        """Never raises and never takes long: without knowledge the ranking is empty."""
        ...


async def resumed_outputs(
    run: ResumableRequest, open_frames: OpenFrames, placer: Placer, board: ReplicaBoard
) -> AsyncGenerator[RequestOutput, None]:
    """Every token once, whatever happens to engines meanwhile.

    An engine that dies costs the computation since its pages are gone; one that is being taken
    away is left, and its pages are pulled from it. Raises `ClientError` as the engine does, and
    `CapacityError` when `MAX_FAILURES` engines in a row have failed.
    """
    num_failures = 0
    leaving: EngineInfo | None = None
    while not run.is_finished:
        request = run.next_attempt()
        assignment = await placer.place(request)
        request = msgspec.structs.replace(request, pull_from=leaving or assignment.pull_from)
        leaving = None
        frames = open_frames(encode_request(request), assignment.ranking)
        try:
            async with Attempt(frames, board) as attempt:
                async for output in attempt.outputs():
                    if attempt.engine_id is not None:
                        assignment.accepted_by(attempt.engine_id)
                    new = run.accept(output)
                    if new is not None:
                        num_failures = 0
                        assignment.first_token()
                        yield new
            if attempt.has_left:
                leaving = attempt.engine_info
                logger.info("%s leaves %s", request.request_id, attempt.engine_id)
            elif not run.is_finished:
                raise EngineDeadError("The engine ended the stream in mid-sequence.")
        except (CapacityError, EngineDeadError) as error:
            num_failures += 1
            logger.warning("attempt %s failed: %s", request.request_id, error)
            if num_failures >= MAX_FAILURES:
                raise _given_up(error) from error
            await asyncio.sleep(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**num_failures))
        finally:
            assignment.close()


def _given_up(error: PageRayError) -> CapacityError:
    return CapacityError(
        f"{MAX_FAILURES} engines in a row could not go on with this request; the last said: "
        f"{error} Try again later.",
        _RETRY_AFTER_S,
    )
