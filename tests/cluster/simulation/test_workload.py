"""Arrivals, and what the best cache could serve."""

import random
from collections import Counter

from pageray.cluster.block_keys import BlockContent, BlockHasher, root_key
from pageray.cluster.simulation.uniform_blocks import UniformBlockHasher
from pageray.cluster.simulation.workload import (
    Arrival,
    SharedPrefixLoad,
    TraceRow,
    arrivals_of_trace,
    optimal_hit_tokens,
    shared_prefix_arrivals,
)

ROOT = root_key("simulated", "bfloat16", 4)


def arrival(tokens: tuple[int, ...], num_prompt_tokens: int) -> Arrival:
    return Arrival(0.0, tokens, num_prompt_tokens, 1)


def test_a_trace_row_becomes_a_prompt() -> None:
    [made] = arrivals_of_trace([TraceRow(3000.0, 10, 7, (5, 6, 9))], speed=2.0)
    assert made == Arrival(1.5, (5, 6, 9), 10, 7)
    assert made.prompt(4) == (5, 5, 5, 5, 6, 6, 6, 6, 9, 9)


def test_the_optimum_counts_whole_blocks_on_their_prefix_but_never_the_last_token() -> None:
    first = arrival((1, 2, 3), 12)
    assert optimal_hit_tokens([first], 4) == 0
    # The same again: the block of its last token is computed.
    assert optimal_hit_tokens([first, first], 4) == 8
    assert optimal_hit_tokens([first, arrival((1, 2, 3, 4), 13)], 4) == 12
    # A block cut short is no block, and one behind another prefix is another one.
    assert optimal_hit_tokens([arrival((1, 2), 7), arrival((1, 2), 7)], 4) == 4
    assert optimal_hit_tokens([first, arrival((2, 3), 8)], 4) == 0


def test_shared_prefixes_are_skewed_and_seeded() -> None:
    load = SharedPrefixLoad(num_requests=600, requests_per_s=20.0, num_groups=10)
    made = list(shared_prefix_arrivals(load, 16, random.Random(1)))
    assert made == list(shared_prefix_arrivals(load, 16, random.Random(1)))
    assert made != list(shared_prefix_arrivals(load, 16, random.Random(2)))
    groups = Counter(each.block_tokens[0] for each in made)
    assert groups[0] > 3 * groups[9 * load.num_prefix_blocks] > 0
    assert 24.0 < made[-1].time_s < 36.0
    tails = [token for each in made for token in each.block_tokens[load.num_prefix_blocks :]]
    assert len(set(tails)) == len(tails)
    assert all(len(each.prompt(16)) == each.num_prompt_tokens for each in made)


def test_uniform_blocks_are_told_apart_as_any_others() -> None:
    hasher, real = UniformBlockHasher(ROOT, 4), BlockHasher(ROOT, 4)
    seen: dict[bytes, bytes] = {}
    for tokens in (
        (1,) * 4,
        (1,) * 8,
        (2,) * 4 + (1,) * 4,
        (1, 1, 1, 2),
        (1, 1, 1, 2) + (3,) * 4,
        (1,) * 4 + (1, 2, 3, 4),
        (1, 2, 1, 1, 1),
    ):
        for salt in ("", "a"):
            chain, expected = list[BlockContent](), list[BlockContent]()
            hasher.extend(chain, tokens, salt)
            real.extend(expected, tokens, salt)
            assert len(chain) == len(expected)
            for ours, theirs in zip(chain, expected, strict=True):
                assert seen.setdefault(ours.key, theirs.key) == theirs.key
    assert len(set(seen.values())) == len(seen)
    again, grown = list[BlockContent](), list[BlockContent]()
    hasher.extend(again, (1,) * 8, "")
    hasher.extend(grown, (1,) * 4, "")
    hasher.extend(grown, (1,) * 8, "")
    assert grown == again
