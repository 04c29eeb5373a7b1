"""What the report derives from times, bytes and operations."""

from pageray.router.bench.gpu_check.findings import AttentionRow, Chip, TimingRow


def bandwidth_share(row: TimingRow | AttentionRow, chip: Chip) -> float:
    """Bytes per second of a call over those of a copy."""
    return row.num_bytes / row.seconds / chip.copy_bytes_per_s


def compute_share(row: TimingRow | AttentionRow, chip: Chip) -> float:
    """Operations per second of a call's products over those of a large matrix product."""
    return row.num_flops / row.seconds / chip.matmul_flop_per_s


def share_of_limit(row: TimingRow | AttentionRow, chip: Chip) -> float:
    """Of whichever limit the call is nearer to: the time it cannot be quicker than over its own."""
    return max(bandwidth_share(row, chip), compute_share(row, chip))


def speed_up(numerator_s: float, denominator_s: float) -> float:
    """How many times quicker the second is."""
    return numerator_s / denominator_s
