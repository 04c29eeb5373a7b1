"""What graphs will take of the device, found out before the KV pool takes the rest."""

from collections.abc import Callable, Sequence

from pageray.workers.graphs.backend import Work
from pageray.workers.graphs.ladder import GraphShape


def measure_graph_bytes(
    capture: Callable[[GraphShape], Work],
    shapes: Sequence[GraphShape],
    free_bytes: Callable[[], int],
) -> int:
    """Device memory of all `shapes` (at least one, the largest first), from capturing two.

    The first takes the memory that all share, and the second what every further one takes beside.
    `free_bytes`: how much the device has left. What was captured is dropped.
    """
    before = free_bytes()
    captured = [capture(shapes[0])]
    first = before - free_bytes()
    if len(shapes) == 1:
        return first
    captured.append(capture(shapes[1]))
    further = before - first - free_bytes()
    return first + (len(shapes) - 1) * max(0, further)
