"""What arrives when: requests read from a trace, or made up."""

from bisect import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

import msgspec

from pageray.cluster.simulation.randomness import Rng

TRACE_BLOCK_SIZE = 512
"""Tokens per hash id of the Mooncake traces."""


class TraceRow(msgspec.Struct, frozen=True):
    """One line of a trace in Mooncake's format (FAST'25): equal hash ids are equal prefixes."""

    timestamp: float
    """Milliseconds."""
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request. Block i of its prompt consists of the token `block_tokens[i]`; the last one may
    be cut short."""

    time_s: float
    block_tokens: tuple[int, ...]
    num_prompt_tokens: int
    num_output_tokens: int

    def prompt(self, block_size: int) -> tuple[int, ...]:
        tokens: list[int] = []
        for token in self.block_tokens:
            tokens += (token,) * block_size
        del tokens[self.num_prompt_tokens :]
        return tuple(tokens)


def arrivals_of_trace(rows: Iterable[TraceRow], speed: float) -> Iterator[Arrival]:
    """`speed` 2 lets the same requests arrive in half the time."""
    for row in rows:
        yield Arrival(
            time_s=row.timestamp / 1e3 / speed,
            block_tokens=row.hash_ids,
            num_prompt_tokens=row.input_length,
            num_output_tokens=row.output_length,
        )


@dataclass(frozen=True, kw_only=True)
class SharedPrefixLoad:
    """Groups of requests that share a prefix, group k asked for in proportion to 1 / k ** skew."""

    num_requests: int
    requests_per_s: float
    num_groups: int = 200
    num_prefix_blocks: int = 16
    num_tail_blocks: int = 4
    """On average; from 1 to twice as many less one."""
    num_output_tokens: int = 64
    skew: float = 1.0


def shared_prefix_arrivals(load: SharedPrefixLoad, block_size: int, rng: Rng) -> Iterator[Arrival]:
    """Poisson arrivals with random tails, which nobody shares."""
    weights = list(accumulate(1 / k**load.skew for k in range(1, load.num_groups + 1)))
    next_token = load.num_groups * load.num_prefix_blocks
    time_s = 0.0
    for _ in range(load.num_requests):
        time_s += rng.expovariate(load.requests_per_s)
        group = min(bisect(weights, rng.random() * weights[-1]), load.num_groups - 1)
        prefix = range(group * load.num_prefix_blocks, (group + 1) * load.num_prefix_blocks)
        num_tail = 1 + rng.randrange(2 * load.num_tail_blocks - 1)
        yield Arrival(
            time_s=time_s,
            block_tokens=(*prefix, *range(next_token, next_token + num_tail)),
            num_prompt_tokens=(load.num_prefix_blocks + num_tail) * block_size
            - rng.randrange(block_size),
            num_output_tokens=load.num_output_tokens,
        )
        next_token += num_tail


def optimal_hit_tokens(arrivals: Iterable[Arrival], block_size: int) -> int:
    """Prompt tokens that one endless cache, shared by all and filled in order of arrival, would
    serve: whole blocks, and never a prompt's last token."""
    # A node of the tree of prefixes is a number; 0 is the root.
    children: dict[tuple[int, int], int] = {}
    num_hit = 0
    for arrival in arrivals:
        node, is_hit = 0, True
        for token in arrival.block_tokens[: arrival.num_prompt_tokens // block_size]:
            child = children.get((node, token))
            is_hit = is_hit and child is not None
            if child is None:
                child = children[node, token] = len(children) + 1
            node = child
            num_hit += is_hit
        is_whole = arrival.num_prompt_tokens % block_size == 0
        if is_hit and is_whole and arrival.num_prompt_tokens:
            num_hit -= 1
    return num_hit * block_size
