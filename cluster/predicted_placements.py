"""What a router has just sent where, until the engines' own events say it.

Siblings of one prompt that arrive together all come before the first "stored" event: without this
they would scatter. Kept apart from the event index, since a prediction may turn out wrong; it is
forgotten soon.
"""

from collections import Counter, deque
from collections.abc import Sequence as SequenceOf

from pageray.cluster.ids import BlockKey, EngineId

DEFAULT_LIFE_S = 4.0


class PredictedPlacements:
    """Keys by the engine they were last routed to, each for `life_s`, `max_keys` in all."""

    def __init__(self, life_s: float = DEFAULT_LIFE_S, max_keys: int = 200_000) -> None:
        self._life_s = life_s
        self._max_keys = max_keys
        # Oldest first; a key that was routed there several times is counted as often.
        self._routed: deque[tuple[float, EngineId, tuple[BlockKey, ...]]] = deque()
        self._counts: dict[EngineId, Counter[BlockKey]] = {}
        self._num_keys = 0

    @property
    def num_keys(self) -> int:
        return self._num_keys

    def add(self, engine_id: EngineId, keys: SequenceOf[BlockKey], now_s: float) -> None:
        """A request with these keys goes to this engine."""
        if not keys:
            return
        self._routed.append((now_s, engine_id, tuple(keys)))
        self._counts.setdefault(engine_id, Counter()).update(keys)
        self._num_keys += len(keys)
        self._forget(now_s)

    def longest_runs(self, keys: SequenceOf[BlockKey], now_s: float) -> dict[EngineId, int]:
        """For each engine that was sent `keys[0]`: how many leading keys it was sent."""
        self._forget(now_s)
        return {
            engine_id: run
            for engine_id, counts in self._counts.items()
            if (run := _leading(keys, counts))
        }

    def drop(self, engine_id: EngineId) -> None:
        """The engine is gone, and with it what it was sent."""
        self._counts.pop(engine_id, None)
        self._num_keys -= sum(len(keys) for _, e, keys in self._routed if e == engine_id)
        self._routed = deque(entry for entry in self._routed if entry[1] != engine_id)

    def _forget(self, now_s: float) -> None:
        while self._routed and (
            self._routed[0][0] <= now_s - self._life_s or self._num_keys > self._max_keys
        ):
            _, engine_id, keys = self._routed.popleft()
            counts = self._counts[engine_id]
            for key in keys:
                counts[key] -= 1
                if not counts[key]:
                    del counts[key]
            if not counts:
                del self._counts[engine_id]
            self._num_keys -= len(keys)


def _leading(keys: SequenceOf[BlockKey], held: Counter[BlockKey]) -> int:
    """Halving, since keys are chained: an engine that was sent one was sent all before it."""
    low, high = 0, len(keys)
    while low < high:
        middle = (low + high) // 2
        if keys[middle] in held:
            low = middle + 1
        else:
            high = middle
    return low
