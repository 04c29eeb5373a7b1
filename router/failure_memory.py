"""Which engines have just failed a request: they may go on failing for a while."""

from pageray.cluster.ids import EngineId

SUSPICION_S = 5.0


class FailureMemory:
    """Times are seconds of one monotonic clock, the caller's."""

    def __init__(self) -> None:
        self._failed_s: dict[EngineId, float] = {}

    def failed(self, engine_id: EngineId, now_s: float) -> None:
        self._failed_s[engine_id] = now_s

    def suspects(self, now_s: float) -> frozenset[EngineId]:
        """Engines that failed within the last `SUSPICION_S`."""
        self._failed_s = {
            engine_id: failed_s
            for engine_id, failed_s in self._failed_s.items()
            if now_s - failed_s < SUSPICION_S
        }
        return frozenset(self._failed_s)
