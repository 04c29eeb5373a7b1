"""How a page is cut into writes by layers."""

from pageray.cluster.head_partition import split_range


def layer_groups(num_layers: int, num_groups: int) -> list[tuple[int, int]]:
    """`num_groups` consecutive ranges (start, end) of layers, fewer when there are fewer layers."""
    count = min(num_groups, num_layers)
    return [split_range(num_layers, count, group) for group in range(count)]
