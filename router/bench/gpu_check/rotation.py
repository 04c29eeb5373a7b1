"""How many sets of inputs to go through, so that none is left in the cache when its turn comes."""

from collections.abc import Callable, Sequence

L2_FACTOR = 4
"""The sets together are so many times the cache: replacement is not strictly by age."""
MAX_SETS = 2048
"""Launches of one captured round. Only inputs of less than a tenth of a mebibyte or so (the draws)
stay in the cache with so many sets; what they take is the launch."""


def num_sets(set_bytes: int, l2_bytes: int) -> int:
    """Sets of `set_bytes` > 0 each; one set is enough once it alone is larger than the cache by
    that factor."""
    return min(MAX_SETS, max(1, -(-L2_FACTOR * l2_bytes // set_bytes)))


def one_round(calls: Sequence[Callable[[], object]]) -> Callable[[], None]:
    """Every call once, in order."""

    def run() -> None:
        for call in calls:
            call()

    return run
