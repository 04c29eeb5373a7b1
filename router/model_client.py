"""The ingress's view of one model's servers, and the one place that calls a Serve handle."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Protocol, cast

import grpc.aio
import ray.exceptions
import ray.serve.exceptions
from ray.serve.handle import DeploymentHandle, DeploymentResponse, DeploymentResponseGenerator

from pageray.cluster.coordinator.coordinator_client import CoordinatorClient
from pageray.cluster.errors import CapacityError, PageRayError, ServerError
from pageray.cluster.generation import GenerateRequest, RequestOutput
from pageray.cluster.ids import EngineId, RequestId
from pageray.router.anywhere_placer import AnywherePlacer
from pageray.router.cluster_placer import ClusterPlacer
from pageray.router.rebalancer import Rebalancer
from pageray.router.replica_board import board_of
from pageray.router.resumable_request import ResumableRequest
from pageray.router.resuming import Resuming
from pageray.router.wire import ModelFacts, decode_facts

logger = logging.getLogger(__name__)

FACTS_AGE_S = 10.0
_RETRY_AFTER_S = 2.0


class ModelClient(Protocol):
    """Whoever can run requests of one model."""

    async def facts(self) -> ModelFacts:
        """The engine's limits, as of the last few seconds."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request. Closing the generator aborts the request."""
        ...

    async def finish_sequence(self, request_id: RequestId, index: int) -> None:
        """End one sequence of a running request; unknown ids are ignored."""
        ...

    async def check_health(self) -> None:
        """Raise `PageRayError` when the model cannot be served."""
        ...


class ServeModelClient:
    """A `ModelClient` over the handle of an `LLMServer` deployment.

    A request goes on over replicas that die or are taken away (`resuming.py`).
    """

    def __init__(self, handle: DeploymentHandle[object], *, is_cluster: bool) -> None:
        """`is_cluster`: its engines share pages, so the coordinator knows who holds what."""
        # By value over gRPC an item costs less than half of what it does through the object store.
        # The option has no public name yet.
        self._handle = handle.options(_by_reference=False)
        self._streaming = handle.options(stream=True, method_name="generate", _by_reference=False)
        board = board_of(handle.app_name, handle.deployment_name)
        lookup = CoordinatorClient(handle.app_name)
        placer = ClusterPlacer(lookup, self.facts, board) if is_cluster else AnywherePlacer()
        self._resuming = Resuming(self._open_frames, placer, board)
        self._rebalancer = Rebalancer(lookup, board, self._resuming) if is_cluster else None
        self._facts: ModelFacts | None = None
        self._fetched_s = 0.0
        self._refresh: asyncio.Task[None] | None = None
        self._running: dict[RequestId, ResumableRequest] = {}

    async def facts(self) -> ModelFacts:
        if self._facts is None:
            await self._fetch_facts()
        elif self._refresh is None and time.monotonic() - self._fetched_s > FACTS_AGE_S:
            self._refresh = asyncio.create_task(self._refresh_facts())
        assert self._facts is not None, "fetched, or an error was raised"
        return self._facts

    async def _refresh_facts(self) -> None:
        """In the background: a new version of the application may serve another model."""
        try:
            await self._fetch_facts()
        except PageRayError as error:
            logger.info("the engine's limits are those of before: %s", error)
        finally:
            self._refresh = None

    async def _fetch_facts(self) -> None:
        self._facts = decode_facts(await self._call("facts"))
        self._fetched_s = time.monotonic()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
        if self._rebalancer is not None:
            self._rebalancer.start(await self.facts())
        run = ResumableRequest(request)
        self._running[request.request_id] = run
        outputs = self._resuming.outputs(run)
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    yield output
        finally:
            del self._running[request.request_id]

    async def finish_sequence(self, request_id: RequestId, index: int) -> None:
        run = self._running.get(request_id)
        if run is None:
            return
        run.finish(index)
        # Which replica runs the request is Serve's secret, so every replica is told. That is a
        # rare call: only n > 1 with stop strings comes here.
        response = self._handle.broadcast("finish_sequence", run.attempt_id, index)
        await response.results_async()

    async def check_health(self) -> None:
        await self._call("probe")

    def _open_frames(
        self, request: bytes, ranking: tuple[EngineId, ...]
    ) -> AsyncGenerator[bytes, None]:
        return _frames(self._streaming, request, ranking)

    async def _call(self, method: str) -> bytes:
        response = cast(
            "DeploymentResponse[bytes]", self._handle.options(method_name=method).remote()
        )
        try:
            return await response
        except _CALL_ERRORS as error:
            raise _unavailable(error) from error


async def _frames(
    handle: DeploymentHandle[object], request: bytes, ranking: tuple[EngineId, ...]
) -> AsyncGenerator[bytes, None]:
    response = cast("DeploymentResponseGenerator[bytes]", handle.remote(request, ranking=ranking))
    iterator = cast(AsyncIterator[bytes], response)
    is_exhausted = False
    try:
        async for frame in iterator:
            yield frame
        is_exhausted = True
    except _CALL_ERRORS as error:
        is_exhausted = True
        raise _unavailable(error) from error
    finally:
        if not is_exhausted:
            # Blocks until the router has let go of the call, so not on the event loop.
            await asyncio.shield(asyncio.to_thread(response.cancel))


_CALL_ERRORS = (
    ray.exceptions.RayError,
    ray.serve.exceptions.RayServeException,
    grpc.aio.AioRpcError,
)


def _unavailable(error: Exception) -> PageRayError:
    """What a failed call means: a fault inside the server, or nobody there to answer."""
    if isinstance(error, ray.exceptions.RayTaskError):
        return ServerError(f"The model's server failed: {type(error).__name__}: {error}")
    return CapacityError(
        f"No server of this model can be reached now ({type(error).__name__}). "
        f"Try again in {_RETRY_AFTER_S:.0f} s.",
        _RETRY_AFTER_S,
    )
