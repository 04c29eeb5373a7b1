"""What goes wrong in a simulation, how often, and until when."""

import enum
from dataclasses import dataclass

from pageray.cluster.simulation.randomness import Rng


@dataclass(frozen=True, kw_only=True)
class FaultPlan:
    """Shares are of all messages or pulls, from 0 to 1; rates are of the whole cluster. The
    default is that nothing goes wrong."""

    until_s: float = 0.0
    """Nothing new goes wrong from then on; what was late or down may still be, for a while."""
    lost_share: float = 0.0
    """Of messages to the coordinator, and of its answers."""
    late_share: float = 0.0
    max_late_s: float = 3.0
    """Later than the sender waits for an answer, so that messages overtake each other."""
    repeated_share: float = 0.0
    deaths_per_s: float = 0.0
    max_restart_s: float = 15.0
    """An engine comes back after up to so long, under a new epoch."""
    gone_share: float = 0.0
    """Of the engines that die: they never come back."""
    coordinator_deaths_per_s: float = 0.0
    max_coordinator_down_s: float = 4.0
    failed_pull_share: float = 0.0
    cut_pull_share: float = 0.0

    @property
    def last_effect_s(self) -> float:
        """By then whatever went wrong is over."""
        return self.until_s + max(self.max_restart_s, self.max_coordinator_down_s, self.max_late_s)


class PullFate(enum.Enum):
    GOOD = "good"
    FAILS = "fails"
    """The holder refuses."""
    IS_CUT = "is cut"
    """The connection breaks on the way."""


class FaultDice:
    """Draws from a plan. Without a plan nothing is drawn."""

    def __init__(self, plan: FaultPlan, rng: Rng) -> None:
        self.plan = plan
        self.rng = rng

    def is_lost(self, now_s: float) -> bool:
        return self._hits(self.plan.lost_share, now_s)

    def is_repeated(self, now_s: float) -> bool:
        return self._hits(self.plan.repeated_share, now_s)

    def delay_s(self, now_s: float) -> float:
        """What a message takes beyond the usual."""
        if not self._hits(self.plan.late_share, now_s):
            return 0.0
        return self.rng.uniform(0.0, self.plan.max_late_s)

    def is_gone(self, now_s: float) -> bool:
        """Whether an engine that dies now stays dead."""
        return self._hits(self.plan.gone_share, now_s)

    def fate_of_pull(self, now_s: float) -> PullFate:
        if self._hits(self.plan.failed_pull_share, now_s):
            return PullFate.FAILS
        return PullFate.IS_CUT if self._hits(self.plan.cut_pull_share, now_s) else PullFate.GOOD

    def _hits(self, share: float, now_s: float) -> bool:
        return share > 0.0 and now_s < self.plan.until_s and self.rng.random() < share
