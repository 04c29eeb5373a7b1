"""Transfers under way, counted against the engines that give the pages."""

from collections import Counter
from typing import NamedTuple

from pageray.cluster.ids import EngineId


class _Lease(NamedTuple):
    engine_id: EngineId
    ends_s: float


class LeaseBook:
    """Leases of `duration_s` each: one whose puller died ends by itself.

    `first_id` should differ between two books that follow each other, so that ending a lease of
    the old one does not end another's of the new.
    """

    def __init__(self, duration_s: float, first_id: int = 1) -> None:
        self._duration_s = duration_s
        self._next_id = first_id
        self._leases: dict[int, _Lease] = {}
        self._counts: Counter[EngineId] = Counter()

    def __len__(self) -> int:
        return len(self._leases)

    def count(self, engine_id: EngineId) -> int:
        return self._counts[engine_id]

    def begin(self, engine_id: EngineId, now_s: float) -> int:
        """A new lease on an engine: its id."""
        lease_id = self._next_id
        self._next_id += 1
        self._leases[lease_id] = _Lease(engine_id, now_s + self._duration_s)
        self._counts[engine_id] += 1
        return lease_id

    def end(self, lease_id: int) -> None:
        """No harm if it has ended already."""
        lease = self._leases.pop(lease_id, None)
        if lease is not None:
            self._discount(lease.engine_id)

    def end_all_of(self, engine_id: EngineId) -> None:
        for lease_id in [i for i, lease in self._leases.items() if lease.engine_id == engine_id]:
            self.end(lease_id)

    def expire(self, now_s: float) -> None:
        # All last equally long, so they end in the order in which they began.
        while self._leases:
            lease_id = next(iter(self._leases))
            if self._leases[lease_id].ends_s > now_s:
                return
            self.end(lease_id)

    def check_invariants(self) -> None:
        assert self._counts == Counter(lease.engine_id for lease in self._leases.values())

    def _discount(self, engine_id: EngineId) -> None:
        self._counts[engine_id] -= 1
        if not self._counts[engine_id]:
            del self._counts[engine_id]
