"""Percentiles of samples, as every benchmark reports them."""

from collections.abc import Sequence

import numpy as np

Summary = dict[str, float]


def summarize(samples: Sequence[float]) -> Summary:
    """`{p50, p90, p99}`, linearly interpolated; all NaN without samples."""
    if not samples:
        return {"p50": float("nan"), "p90": float("nan"), "p99": float("nan")}
    p50, p90, p99 = (float(np.percentile(samples, share)) for share in (50, 90, 99))
    return {"p50": p50, "p90": p90, "p99": p99}
