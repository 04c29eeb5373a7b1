"""What pulling pages from other engines has come to."""

from dataclasses import dataclass


@dataclass
class PullCounters:
    """Since the start."""

    num_lookups: int = 0
    num_predicted_blocks: int = 0
    """Blocks that a holder was said to have and that were asked for ..."""
    num_delivered_blocks: int = 0
    """... and those of them that came and were verified."""
    num_pulls: int = 0
    num_failed_pulls: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
