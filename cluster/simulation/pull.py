"""The destination's side of a transfer: `workers/page_service/puller.py` in simulated time."""

import itertools
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Protocol

from pageray.cluster.block_keys import BlockContent
from pageray.cluster.coordinator.messages import EngineInfo
from pageray.cluster.ids import EngineId, TransferId
from pageray.cluster.measured_rate import MeasuredRate
from pageray.cluster.page_imports import Import, PageImports
from pageray.cluster.pull_cost import MIN_MEASURED_BLOCKS, PULL_RATE_LIFE_S
from pageray.cluster.pull_counters import PullCounters
from pageray.cluster.simulation.cost_model import MESSAGE_S
from pageray.cluster.simulation.event_loop import EventLoop, Future, Scope
from pageray.cluster.simulation.faults import FaultDice, PullFate
from pageray.cluster.simulation.push import Push, Pushes, TransferError

MAX_PULLS = 8
SETTLE_RETRY_S = 0.2


class Peer(Protocol):
    """An engine as its peers see it."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def pushes(self) -> Pushes: ...


Peers = Callable[[EngineId], Peer | None]
"""Who lives under an id now."""


class Puller:
    """One engine's pulls, `MAX_PULLS` at a time."""

    def __init__(
        self,
        loop: EventLoop,
        scope: Scope,
        *,
        imports: PageImports,
        num_spare_blocks: Callable[[], int],
        peers: Peers,
        dice: FaultDice,
        latency_s: float,
        block_bytes: int,
    ) -> None:
        self._loop = loop
        self._scope = scope
        self._imports = imports
        self._num_spare_blocks = num_spare_blocks
        self._peers = peers
        self._dice = dice
        self._latency_s = latency_s
        self._ids = itertools.count(1)
        self._num_running = 0
        self._queue: deque[Future[None]] = deque()
        self.block_bytes = block_bytes
        self._rate = MeasuredRate(PULL_RATE_LIFE_S)
        self.counters = PullCounters()

    @property
    def pull_bytes_per_s(self) -> float:
        """Measured; 0 if not, or not lately."""
        return self._rate.per_s(self._loop.now_s)

    async def pull(
        self,
        contents: SequenceOf[BlockContent],
        source: EngineInfo,
        num_predicted: int,
        timeout_s: float,
    ) -> None:
        """Bring what `source` has of a chain and this engine has not, or nothing."""
        self.counters.num_pulls += 1
        self.counters.num_predicted_blocks += num_predicted
        while self._num_running >= MAX_PULLS:
            turn: Future[None] = Future()
            self._queue.append(turn)
            await turn
        self._num_running += 1
        begun = self._imports.begin(TransferId(next(self._ids)), contents, self._num_spare_blocks())
        if begun is not None:
            await self._fill(begun, contents, source, timeout_s)
        self._num_running -= 1
        if self._queue:
            self._queue.popleft().set_result(None)

    async def _fill(
        self,
        begun: Import,
        contents: SequenceOf[BlockContent],
        source: EngineInfo,
        timeout_s: float,
    ) -> None:
        started_s = self._loop.now_s
        push: Push | None = None
        try:
            push = await self._ask(begun, contents, source)
            num_arrived = 0
            if push is not None:
                num_arrived = await self._loop.within(timeout_s, push.ended)
                await self._loop.sleep(self._latency_s / 2)
        except (TransferError, TimeoutError):
            self._imports.abort(begun.transfer_id)
            self.counters.num_failed_pulls += 1
            self._loop.spawn(self._settle(begun.transfer_id, push), self._scope)
            return
        self._imports.finish(begun.transfer_id, num_arrived)
        self._count(num_arrived, self._loop.now_s - started_s)

    async def _ask(
        self, begun: Import, contents: SequenceOf[BlockContent], source: EngineInfo
    ) -> Push | None:
        await self._loop.sleep(self._latency_s / 2)
        peer = self._peers(source.engine_id)
        fate = self._dice.fate_of_pull(self._loop.now_s)
        if peer is None or peer.info.epoch != source.epoch or fate is PullFate.FAILS:
            raise TransferError(f"{source.engine_id} of epoch {source.epoch} does not answer.")
        push = peer.pushes.begin(contents, begun.num_local, len(begun.block_ids))
        if push is not None and fate is PullFate.IS_CUT:
            # Some pages have been written by then.
            cut_s = self._dice.rng.uniform(0.0, 0.02)
            self._loop.after(cut_s, lambda: push.stop("The connection broke."))
        return push

    async def _settle(self, transfer_id: TransferId, push: Push | None) -> None:
        """Ask the source to stop until it says that it has; a dead one has stopped."""
        while True:
            await self._loop.sleep(MESSAGE_S)
            if not self._dice.is_lost(self._loop.now_s):
                break
            await self._loop.sleep(SETTLE_RETRY_S)
        if push is not None:
            push.stop("The destination gave up.")
        await self._loop.sleep(MESSAGE_S)
        self._imports.settle(transfer_id)

    def _count(self, num_arrived: int, seconds: float) -> None:
        num_bytes = num_arrived * self.block_bytes
        self.counters.num_delivered_blocks += num_arrived
        self.counters.num_bytes += num_bytes
        self.counters.seconds += seconds
        if num_arrived >= MIN_MEASURED_BLOCKS:
            self._rate.observe(num_bytes, seconds, self._loop.now_s)
