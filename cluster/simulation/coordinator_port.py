"""The coordinator as engines and routers reach it: over a network that may fail them."""

from collections.abc import Callable
from typing import TypeVar

from pageray.cluster.coordinator.coordinator import Coordinator
from pageray.cluster.coordinator.errors import CoordinatorUnavailableError
from pageray.cluster.simulation.cost_model import MESSAGE_S
from pageray.cluster.simulation.event_loop import EventLoop, Future, Scope
from pageray.cluster.simulation.faults import FaultDice

R = TypeVar("R")

EXPIRE_PERIOD_S = 1.0
_LEASES_PER_LIFE = 1_000_000


class CoordinatorPort:
    """Each call is a message there and one back; either may be lost, late or repeated."""

    def __init__(self, loop: EventLoop, dice: FaultDice, scope: Scope) -> None:
        self._loop = loop
        self._dice = dice
        self._up_again_s = 0.0
        self.num_lives = 1
        self.coordinator = Coordinator()
        loop.spawn(self._expire(), scope)

    def restart(self, down_s: float) -> None:
        """It is gone for so long, and comes back knowing nothing."""
        self._up_again_s = self._loop.now_s + down_s
        self.coordinator = Coordinator(first_lease_id=1 + self.num_lives * _LEASES_PER_LIFE)
        self.num_lives += 1

    async def call(self, ask: Callable[[Coordinator, float], R], timeout_s: float) -> R:
        """`ask` is run with the coordinator and the time, perhaps later than the caller waits.

        Raises `CoordinatorUnavailableError` when no answer has come in time.
        """
        answer: Future[R] = Future()
        loop = self._loop
        if not self._dice.is_lost(loop.now_s):
            loop.after(self._one_way_s(), lambda: self._arrive(ask, answer))
        if self._dice.is_repeated(loop.now_s):
            loop.after(self._one_way_s(), lambda: self._arrive(ask, answer))
        try:
            return await loop.within(timeout_s, answer)
        except TimeoutError:
            raise CoordinatorUnavailableError(f"no answer within {timeout_s} s") from None

    def _arrive(self, ask: Callable[[Coordinator, float], R], answer: Future[R]) -> None:
        now_s = self._loop.now_s
        if now_s < self._up_again_s:
            return
        reply = ask(self.coordinator, now_s)
        if not self._dice.is_lost(now_s):
            self._loop.after(self._one_way_s(), lambda: answer.set_result(reply))

    def _one_way_s(self) -> float:
        return MESSAGE_S + self._dice.delay_s(self._loop.now_s)

    async def _expire(self) -> None:
        while True:
            await self._loop.sleep(EXPIRE_PERIOD_S)
            self.coordinator.expire(self._loop.now_s)
