"""A measured rate that follows change and forgives a single odd sample."""

_WEIGHT = 0.2


class RateMeter:
    """Exponentially weighted mean of `amount / seconds`; 0 until something was observed."""

    def __init__(self) -> None:
        self.per_s = 0.0

    def observe(self, amount: float, seconds: float) -> None:
        if seconds <= 0.0:
            return
        rate = amount / seconds
        self.per_s = rate if self.per_s == 0.0 else self.per_s + _WEIGHT * (rate - self.per_s)
