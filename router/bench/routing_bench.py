"""The same requests, at the same times, under each policy: what was computed, and how long first
tokens took."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pageray.router.bench.prefix_optimum import least_prefill_tokens
from pageray.router.bench.routing_client import Answer
from pageray.router.bench.routing_load import RoutingLoad
from pageray.router.bench.routing_policies import ROUND_ROBIN, RoutingPolicy
from pageray.router.bench.routing_testbed import EngineCounts, RoutingApp, RoutingTestbed
from pageray.router.bench.summary import Summary, summarize

CLIENTS_PER_ENGINE = 4
"""Requests at once when it is measured how many an application can answer."""


@dataclass(frozen=True, kw_only=True)
class RoutingRow:
    """One load under one policy."""

    load: str
    policy: str
    requests: int
    requests_per_s: float
    """Of the arrivals."""
    prompt_tokens: int
    prefill_tokens: int
    """Prompt tokens computed, by all engines together: every token that they computed but one per
    output token after a request's first. Tokens found in a cache or pulled are none of them."""
    optimum_tokens: int
    """`least_prefill_tokens`."""
    ratio: float
    """`prefill_tokens` over `optimum_tokens`."""
    ttft_ms: Summary
    """Time from when a request was due to its first token."""
    imbalance: float
    """Tokens computed by the busiest engine, over the mean of all."""
    pulled_blocks: int
    failed_pulls: int
    failures: int
    """Requests without a whole answer; the other figures mean something only without any."""
    first_failure: str | None


def measure_capacities(
    testbed: RoutingTestbed, loads: Sequence[RoutingLoad], on_answer: Callable[[], object]
) -> list[float]:
    """Requests of each load that round robin answers in a second, with some always waiting."""
    with testbed.deployed(ROUND_ROBIN) as app:
        return asyncio.run(_capacities(app, loads, on_answer))


def measure_policy(
    testbed: RoutingTestbed,
    load: RoutingLoad,
    policy: RoutingPolicy,
    on_answer: Callable[[], object],
) -> RoutingRow:
    """Deploy, run the load once, delete."""
    with testbed.deployed(policy) as app:
        return asyncio.run(_run(app, load, policy.name, on_answer))


async def _capacities(
    app: RoutingApp, loads: Sequence[RoutingLoad], on_answer: Callable[[], object]
) -> list[float]:
    client = app.client()
    capacities: list[float] = []
    try:
        for load in loads:
            start_s = time.monotonic()
            at_once = CLIENTS_PER_ENGINE * app.num_replicas
            await client.run_closed(load.requests, at_once, on_answer)
            capacities.append(len(load.requests) / (time.monotonic() - start_s))
    finally:
        await client.close()
    return capacities


async def _run(
    app: RoutingApp, load: RoutingLoad, policy: str, on_answer: Callable[[], object]
) -> RoutingRow:
    client = app.client()
    try:
        facts = await app.facts()
        before = await app.counts()
        answers = await client.run_open(load.requests, on_answer)
        after = await app.counts()
    finally:
        await client.close()
    counts = [now.since(then) for now, then in zip(after, before, strict=True)]
    return routing_row(load, policy, answers, counts, facts.block_size)


def routing_row(
    load: RoutingLoad,
    policy: str,
    answers: Sequence[Answer],
    counts: Sequence[EngineCounts],
    block_size: int,
) -> RoutingRow:
    """The figures from what clients (`answers`, one per request) and engines (`counts`) saw."""
    computed = [each.num_computed_tokens for each in counts]
    num_decoded = sum(request.max_tokens - 1 for request in load.requests)
    prefill_tokens = sum(computed) - num_decoded
    optimum_tokens = least_prefill_tokens(load.prompts, block_size)
    failures = [answer.failure for answer in answers if answer.failure is not None]
    first_ms = [1e3 * answer.first_token_s for answer in answers if answer.failure is None]
    span_s = load.requests[-1].arrival_s
    return RoutingRow(
        load=load.name,
        policy=policy,
        requests=len(load.requests),
        requests_per_s=(len(load.requests) - 1) / span_s if span_s else float("inf"),
        prompt_tokens=load.num_prompt_tokens,
        prefill_tokens=prefill_tokens,
        optimum_tokens=optimum_tokens,
        ratio=prefill_tokens / optimum_tokens,
        ttft_ms=summarize(first_ms),
        imbalance=max(computed) * len(computed) / sum(computed),
        pulled_blocks=sum(each.num_pulled_blocks for each in counts),
        failed_pulls=sum(each.num_failed_pulls for each in counts),
        failures=len(failures),
        first_failure=failures[0] if failures else None,
    )
