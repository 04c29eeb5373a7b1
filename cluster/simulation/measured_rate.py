"""What an engine measures of itself: as `workers/rate_meter.py`."""

_WEIGHT = 0.2


class MeasuredRate:
    """Exponentially weighted mean of `amount / seconds`; 0 until something was observed."""

    def __init__(self) -> None:
        self.per_s = 0.0

    def observe(self, amount: float, seconds: float) -> None:
        if seconds > 0.0:
            rate = amount / seconds
            self.per_s += (_WEIGHT if self.per_s else 1.0) * (rate - self.per_s)
