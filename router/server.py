"""The Serve deployment that owns an engine."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from pageray.cluster.coordinator.errors import CoordinatorUnavailableError
from pageray.cluster.coordinator.messages import EngineInfo, Role
from pageray.cluster.errors import ConfigError, PageRayError, ServerError
from pageray.cluster.generation import GenerateRequest
from pageray.cluster.ids import EngineId, RequestId
from pageray.cluster.member_spec import MemberSpec
from pageray.router.engine_protocol import Engine, EngineFactory, start_async_engine
from pageray.router.llm_config import LLMConfig
from pageray.router.metrics import EngineMetrics
from pageray.router.replica_place import replica_place, wake_coordinator
from pageray.router.request_timer import RequestTimer
from pageray.router.wire import (
    ModelFacts,
    decode_request,
    encode_accepted,
    encode_error,
    encode_facts,
    encode_output,
)

logger = logging.getLogger(__name__)

_STATS_PERIOD_S = 2.0
_JOIN_RETRY_S = 2.0
_JOIN_PATIENCE_S = 3.0
"""Without the coordinator an engine serves alone until it comes."""


class LLMServer:
    """One engine behind a Serve handle. Messages are MessagePack (`wire.py`)."""

    # Serve calls __del__ even when the constructor has failed.
    _engine: Engine | None = None
    _stats_task: asyncio.Task[None] | None = None
    _join_task: asyncio.Task[None] | None = None

    async def __init__(
        self,
        llm_config: LLMConfig,
        engine_factory: EngineFactory = start_async_engine,
        role: Role = "both",
    ) -> None:
        """Returns when the engine can serve. The engine finds the replica's placement group by
        itself."""
        place = replica_place(role, moves_pages=llm_config.move_pages)
        is_sharing = place is not None and llm_config.share_pages
        coordinator = asyncio.create_task(wake_coordinator(place)) if is_sharing else None
        self._engine = await asyncio.to_thread(engine_factory, llm_config.engine_config())
        self._running: set[RequestId] = set()
        self._engine_id = EngineId("") if place is None else place.engine_id
        self._engine_info: EngineInfo | None = None
        if place is not None and coordinator is not None:
            self._join_task = asyncio.create_task(self._join(place))
            # Streams may move here the moment this returns, and want to bring their pages along.
            await asyncio.wait([self._join_task], timeout=_JOIN_PATIENCE_S)
        self._metrics: EngineMetrics | None = None
        if llm_config.log_engine_metrics:
            self._metrics = EngineMetrics(llm_config.model_id)
            self._stats_task = asyncio.create_task(self._record_stats(self._metrics))

    async def generate(
        self, request_bytes: bytes, ranking: tuple[EngineId, ...] = ()
    ) -> AsyncGenerator[bytes, None]:
        """Frames of one `GenerateRequest`: that it was accepted, then outputs, or one error as
        the last. Closing or cancelling the generator aborts the request.

        `ranking` is for the request router on the way here.
        """
        del ranking
        try:
            request = decode_request(request_bytes)
            yield encode_accepted(self._engine_id, self._engine_info)
            async with aclosing(self._outputs(request)) as frames:
                async for frame in frames:
                    yield frame
        except PageRayError as error:
            yield encode_error(error)
        except msgspec.DecodeError as error:
            yield encode_error(ServerError(f"The ingress sent a request that is none: {error}"))
        except Exception:  # process boundary: the ingress gets a frame, the log the traceback
            logger.exception("generate failed")
            yield encode_error(ServerError("The model's server failed; its log says why."))

    async def finish_sequence(self, request_id: RequestId, index: int) -> None:
        """End one sequence early. Every replica is told; those that do not run the request do
        nothing."""
        if request_id in self._running:
            self._started_engine().finish_sequence(request_id, index)

    async def facts(self) -> bytes:
        engine = self._started_engine()
        return encode_facts(
            ModelFacts(
                vocab_size=engine.vocab_size,
                max_model_len=engine.max_model_len,
                capacity_tokens=engine.capacity_tokens,
                eos_token_ids=tuple(engine.eos_token_ids),
                block_size=engine.block_size,
                root_key=engine.root_key,
            )
        )

    async def engine_id(self) -> EngineId:
        """Another one after every restart."""
        return self._engine_id

    async def probe(self) -> bytes:
        """`check_health` for the ingress; any answer is a good one."""
        await self.check_health()
        return b""

    async def check_health(self) -> None:
        """Serve replaces the replica when this raises."""
        self._started_engine().check_health()

    async def record_routing_stats(self) -> dict[str, float]:
        """What Serve shows to request routers of this deployment."""
        engine = self._started_engine()
        stats = await engine.stats()
        pulls = engine.pull_counters
        return {
            "num_pulled_blocks": pulls.num_delivered_blocks,
            "num_failed_pulls": pulls.num_failed_pulls,
            "num_computed_tokens": stats.num_computed_tokens,
            "num_running": stats.num_running,
            "num_waiting": stats.num_waiting,
            "num_held_blocks": stats.num_held_blocks,
            "num_blocks": stats.num_blocks,
        }

    def __del__(self) -> None:
        """Serve calls this after the last request has ended; Python may do so again."""
        for task in (self._stats_task, self._join_task):
            if task is not None:
                task.cancel()
        self._stats_task = self._join_task = None
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None

    def _started_engine(self) -> Engine:
        assert self._engine is not None, "used before start or after shutdown"
        return self._engine

    async def _join(self, spec: MemberSpec) -> None:
        """Join the application's cluster, however often that has to be tried."""
        while self._engine_info is None:
            try:
                self._engine_info = await self._started_engine().join(spec)
            except CoordinatorUnavailableError as error:
                logger.warning("Prefixes are not shared with other engines yet: %s", error)
                await asyncio.sleep(_JOIN_RETRY_S)
            except ConfigError as error:
                logger.warning("Prefixes are not shared with other engines: %s", error)
                return

    async def _outputs(self, request: GenerateRequest) -> AsyncGenerator[bytes, None]:
        timer = RequestTimer(time.monotonic())
        self._running.add(request.request_id)
        try:
            outputs = self._started_engine().generate(request)
            async with aclosing(outputs):
                async for output in outputs:
                    timer.observe(output, time.monotonic())
                    yield encode_output(output)
        finally:
            self._running.discard(request.request_id)
            if self._metrics is not None:
                self._metrics.record_request(timer)

    async def _record_stats(self, metrics: EngineMetrics) -> None:
        while True:
            engine = self._started_engine()
            metrics.record_stats(await engine.stats())
            metrics.record_pulls(engine.pull_counters, engine.block_size)
            await asyncio.sleep(_STATS_PERIOD_S)
