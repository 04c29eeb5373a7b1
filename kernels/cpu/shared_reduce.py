"""All-reduce and gather between the processes of one host, through memory they all map.

    flags   one 128-byte line per rank: the number of the last operation it has contributed to
    slots   [2 (parity of the operation), ranks, capacity] bytes

For operation s a rank copies its part into slot [s % 2, rank], stores s into its flag, waits until
every flag has reached s, and reads the others' slots. One barrier is enough: a slot is written
again at operation s + 2, and nobody gets there before all have arrived at s + 1, that is, have read
what they needed of s. Sums run in rank order on every rank, so all ranks get the same bits.
"""

from pageray.kernels.cpu.jit import jit
from pageray.kernels.cpu.memory import Pointer, flat, past
from pageray.kernels.cpu.numerics import ZERO, narrow, widen
from pageray.kernels.cpu.shared_words import load_acquire, store_release, yield_core

FLAG_BYTES = 128
"""A line of its own, and of the neighbour that processors prefetch with it."""

NOBODY_LATE = -1

_SPINS = 20_000
"""About 50 us; after that the wait gives its core away between looks."""
_YIELDS = 2_000
"""Looks after which the caller is asked whether waiting still makes sense."""


def region_bytes(num_ranks: int, capacity: int) -> int:
    """Size of the memory that all ranks map."""
    return num_ranks * FLAG_BYTES + 2 * num_ranks * capacity


@jit
def contribute(
    region: int, num_ranks: int, capacity: int, rank: int, operation: int, x: Pointer, count: int
) -> None:
    """Copy `count` elements of x into this rank's slot and raise its flag."""
    source = flat(x, 0)
    slot = flat((_slot(region, num_ranks, capacity, rank, operation), x[1]), 0)
    for i in range(count):
        slot[i] = source[i]
    store_release(region + rank * FLAG_BYTES, operation)


@jit
def wait_for_all(region: int, num_ranks: int, operation: int) -> int:
    """-1 once every rank has contributed to `operation`, or the rank that has not for long."""
    for rank in range(num_ranks):
        flag = region + rank * FLAG_BYTES
        looks = 0
        while load_acquire(flag) < operation:
            looks += 1
            if looks > _SPINS:
                yield_core()
            if looks > _SPINS + _YIELDS:
                return rank
    return -1


@jit
def sum_slots(
    region: int, num_ranks: int, capacity: int, operation: int, x: Pointer, count: int
) -> None:
    """x = the sum over the ranks' slots, added in float32 in rank order, rounded once."""
    result = flat(x, 0)
    if num_ranks == 2:  # the common case, in one pass
        first = flat((_slot(region, 2, capacity, 0, operation), x[1]), 0)
        second = flat((_slot(region, 2, capacity, 1, operation), x[1]), 0)
        for i in range(count):
            result[i] = narrow(widen(first[i]) + widen(second[i]), result)
        return
    for i in range(count):
        total = ZERO
        for rank in range(num_ranks):
            slot = flat((_slot(region, num_ranks, capacity, rank, operation), x[1]), 0)
            total += widen(slot[i])
        result[i] = narrow(total, result)


@jit
def copy_slot(
    region: int,
    num_ranks: int,
    capacity: int,
    rank: int,
    operation: int,
    target: Pointer,
    count: int,
) -> None:
    """target = `count` elements of one rank's slot."""
    slot = flat((_slot(region, num_ranks, capacity, rank, operation), target[1]), 0)
    result = flat(target, 0)
    for i in range(count):
        result[i] = slot[i]


@jit
def sum_over_ranks(
    region: tuple[int, int, int, int], operation: int, x: Pointer, count: int, late_piece: int
) -> tuple[int, int]:
    """x = the sum over the ranks, in pieces that fit a slot.

    `region` and `operation` are those of `RankSums`. Returns the number of the last operation and
    NOBODY_LATE; or, if a rank has not come for long, the piece at which it is late. Whoever has
    waited for it calls again with that piece, to which this rank has contributed already.
    """
    address, num_ranks, capacity, rank = region
    step = capacity // flat(x, 0).itemsize
    piece = max(late_piece, 0)
    while piece * step < count:
        at, size = past(x, piece * step), min(step, count - piece * step)
        if piece != late_piece:
            operation += 1
            contribute(address, num_ranks, capacity, rank, operation, at, size)
        if wait_for_all(address, num_ranks, operation) >= 0:
            return operation, piece
        sum_slots(address, num_ranks, capacity, operation, at, size)
        piece += 1
    return operation, NOBODY_LATE


@jit
def _slot(region: int, num_ranks: int, capacity: int, rank: int, operation: int) -> int:
    return region + num_ranks * FLAG_BYTES + ((operation & 1) * num_ranks + rank) * capacity
