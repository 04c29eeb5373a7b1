"""A measured rate that follows change, forgives a single odd sample, and grows old."""

import math

_WEIGHT = 0.2


class MeasuredRate:
    """Exponentially weighted mean of `amount / seconds`.

    `life_s`: a rate that was not measured for so long is not known any more. Without that, one bad
    sample could keep an engine from ever doing what would give it a better one.
    """

    def __init__(self, life_s: float = math.inf) -> None:
        self._life_s = life_s
        self._per_s = 0.0
        self._measured_s = -math.inf

    def observe(self, amount: float, seconds: float, now_s: float = 0.0) -> None:
        if seconds <= 0.0:
            return
        known = self.per_s(now_s)
        rate = amount / seconds
        self._per_s = rate if known == 0.0 else known + _WEIGHT * (rate - known)
        self._measured_s = now_s

    def per_s(self, now_s: float = 0.0) -> float:
        """0: not measured, or too long ago."""
        return self._per_s if now_s - self._measured_s <= self._life_s else 0.0
