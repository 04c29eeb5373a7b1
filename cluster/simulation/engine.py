"""One engine in one epoch: the real scheduler, pool, imports and exports on simulated ranks."""

from collections.abc import Callable
from dataclasses import dataclass

from pageray.cluster.admission import EngineLimits
from pageray.cluster.block_events import BlockEventLog
from pageray.cluster.block_keys import BlockHasher
from pageray.cluster.block_pool import BlockPool
from pageray.cluster.coordinator.messages import EngineInfo, EngineLoad
from pageray.cluster.errors import EngineDeadError
from pageray.cluster.generation import GenerateRequest, RequestOutput
from pageray.cluster.ids import RequestId
from pageray.cluster.measured_rate import MeasuredRate
from pageray.cluster.page_exports import PageExports
from pageray.cluster.page_imports import PageImports
from pageray.cluster.scheduler import Scheduler, SchedulerConfig
from pageray.cluster.simulation.coordinator_port import CoordinatorPort
from pageray.cluster.simulation.cost_model import MESSAGE_S, CostModel
from pageray.cluster.simulation.engine_link import EngineLink
from pageray.cluster.simulation.event_loop import EventLoop, Future, Scope
from pageray.cluster.simulation.executor import VOCAB_SIZE, SimulatedRanks
from pageray.cluster.simulation.faults import FaultDice
from pageray.cluster.simulation.prefetch import Prefetch
from pageray.cluster.simulation.pull import Peers, Puller
from pageray.cluster.simulation.push import Pushes
from pageray.cluster.simulation.shared_line import SharedLine
from pageray.cluster.step import StepPlan, StepResult

DEATH_NOTICE_S = 0.5
"""Until others notice that an engine has died."""
_RETRY_S = 0.005
_MIN_PREFILL_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Meanings as in `EngineConfig`."""

    block_size: int = 512
    num_blocks: int = 800
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    max_model_len: int = 262_144

    @property
    def limits(self) -> EngineLimits:
        return EngineLimits(
            vocab_size=VOCAB_SIZE,
            max_model_len=self.max_model_len,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            eos_token_ids=(),
        )


@dataclass(frozen=True, kw_only=True)
class EngineWorld:
    """What all engines of a simulation have in common."""

    loop: EventLoop
    port: CoordinatorPort
    peers: Peers
    dice: FaultDice
    hasher: BlockHasher
    cost: CostModel
    settings: EngineSettings


@dataclass(slots=True)
class _Stream:
    on_output: Callable[[RequestOutput], None]
    ended: Future[None]


class SimulatedEngine:
    """Lives from construction until `die`, after which it does and says nothing more."""

    def __init__(self, world: EngineWorld, info: EngineInfo, first_wait_s: float) -> None:
        """`first_wait_s`: until it first speaks to the coordinator. Without an endpoint in `info`
        it pulls from nobody, and nobody from it."""
        settings, cost, loop = world.settings, world.cost, world.loop
        block_bytes = info.layout.page_bytes(0)
        self.info = info
        self.scope = Scope()
        self.pool = BlockPool(settings.num_blocks, BlockEventLog())
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_batched_tokens=settings.max_num_batched_tokens),
            settings.limits,
            self.pool,
            world.hasher,
        )
        self.imports = PageImports(self.pool)
        self.exports = PageExports(self.pool)
        line = SharedLine(loop, cost.push_bytes_per_s)
        self.pushes = Pushes(self.exports, line, block_bytes)
        self.ranks = SimulatedRanks(cost)
        self.puller = Puller(
            loop,
            self.scope,
            imports=self.imports,
            num_spare_blocks=lambda: self.scheduler.num_spare_blocks,
            peers=world.peers,
            dice=world.dice,
            latency_s=cost.pull_latency_s,
            block_bytes=block_bytes,
        )
        self._prefetch = Prefetch(
            loop,
            self.scope,
            port=world.port,
            info=info,
            pool=self.pool,
            hasher=world.hasher,
            puller=self.puller,
        )
        self.link = EngineLink(loop, world.port, info, self.pool, self._load)
        self._loop = loop
        self._rate = MeasuredRate()
        self._streams: dict[RequestId, _Stream] = {}
        self._is_stepping = False
        loop.spawn(self.link.run(first_wait_s), self.scope)

    def serve(
        self, request: GenerateRequest, on_output: Callable[[RequestOutput], None]
    ) -> Future[None]:
        """Done after the last output; an `EngineDeadError` when there will be none."""
        ended: Future[None] = Future()
        if self.scope.is_closed:
            self._loop.after(MESSAGE_S, lambda: ended.set_exception(EngineDeadError("gone")))
            return ended
        self._streams[request.request_id] = _Stream(on_output, ended)
        self._loop.spawn(self._accept(request), self.scope)
        return ended

    def die(self) -> None:
        """At once and without a word."""
        self.scope.close()
        streams, self._streams = self._streams, {}

        def notice() -> None:
            self.pushes.break_all()
            for stream in streams.values():
                stream.ended.set_exception(EngineDeadError(f"{self.info.engine_id} died."))

        self._loop.after(DEATH_NOTICE_S, notice)

    def check_invariants(self) -> None:
        self.scheduler.check_invariants(self.imports.tables())

    async def _accept(self, request: GenerateRequest) -> None:
        await self._loop.sleep(MESSAGE_S)
        if self.info.endpoint is not None:
            await self._prefetch.run(request, self._rate.per_s(), can_ask=self.link.is_registered)
        self.scheduler.add(request)
        if not self._is_stepping:
            self._step()

    def _step(self) -> None:
        if self.scope.is_closed:
            return
        self._is_stepping = True
        plan = self.scheduler.schedule()
        if plan is not None:
            result, seconds = self.ranks.execute(plan)
            self._loop.after(seconds, lambda: self._finish(plan, result, seconds))
        elif self.scheduler.has_requests:
            # All room is taken by pages on their way; it will not be for long.
            self._loop.after(_RETRY_S, self._step)
        else:
            self._is_stepping = False

    def _finish(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        if self.scope.is_closed:
            return
        if plan.num_tokens >= _MIN_PREFILL_TOKENS:
            self._rate.observe(plan.num_tokens, seconds)
        for output in self.scheduler.update(result):
            stream = self._streams[output.request_id]
            stream.on_output(output)
            if output.is_finished:
                del self._streams[output.request_id]
                stream.ended.set_result(None)
        self._step()

    def _load(self) -> EngineLoad:
        return EngineLoad(
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            num_queued_tokens=self.scheduler.num_queued_tokens,
            num_free_blocks=self.pool.num_available,
            prefill_tokens_per_s=self._rate.per_s(),
            pull_bytes_per_s=self.puller.pull_bytes_per_s,
        )
