"""Requests for `pageray bench routing`: prompts as token ids, and when each arrives."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace

_FIRST_ID, _END_ID = 100, 40_000
"""Ordinary tokens of every model here: no control tokens among them."""


@dataclass(frozen=True)
class RoutingRequest:
    arrival_s: float
    """After the first one; `RoutingLoad.at_rate` decides what a second is."""
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    """Exactly so many are generated."""


@dataclass(frozen=True)
class RoutingLoad:
    """The same requests for every policy, in order of arrival."""

    name: str
    requests: tuple[RoutingRequest, ...]

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        return [request.prompt_token_ids for request in self.requests]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    def at_rate(self, requests_per_s: float) -> "RoutingLoad":
        """Arrivals stretched or compressed to a mean rate; their pattern stays."""
        span = self.requests[-1].arrival_s
        if span <= 0.0:
            return self
        factor = (len(self.requests) - 1) / requests_per_s / span
        return replace(
            self,
            requests=tuple(
                replace(request, arrival_s=factor * request.arrival_s) for request in self.requests
            ),
        )


@dataclass(frozen=True, kw_only=True)
class SharedPrefixes:
    """`num_groups` long beginnings; each request continues one of them with a tail of its own.

    Groups differ in popularity: the k-th is asked for in proportion to 1 / k ** `skew`. Arrivals
    are a Poisson process.
    """

    num_requests: int
    num_groups: int
    prefix_len: int
    max_tail_len: int
    output_len: int
    skew: float = 1.0
    seed: int = 0

    def load(self) -> RoutingLoad:
        rng = random.Random(f"{self.seed} shared prefixes")
        prefixes = [random_tokens(rng, self.prefix_len) for _ in range(self.num_groups)]
        weights = [(rank + 1) ** -self.skew for rank in range(self.num_groups)]
        arrival_s = 0.0
        requests: list[RoutingRequest] = []
        for _ in range(self.num_requests):
            tail = random_tokens(rng, rng.randint(1, self.max_tail_len))
            prompt = rng.choices(prefixes, weights)[0] + tail
            requests.append(RoutingRequest(arrival_s, prompt, self.output_len))
            arrival_s += rng.expovariate(1.0)
        return RoutingLoad("shared prefixes", tuple(requests))


def cold_requests(count: int, length: int, max_tokens: int, seed: str) -> list[RoutingRequest]:
    """Prompts that have nothing in common with any other, all at once."""
    rng = random.Random(f"{seed} cold")
    return [RoutingRequest(0.0, random_tokens(rng, length), max_tokens) for _ in range(count)]


def random_tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(_FIRST_ID, _END_ID) for _ in range(count))


def tokens_of_ids(seed: int, ids: Iterable[int], tokens_per_id: int) -> tuple[int, ...]:
    """The same `tokens_per_id` tokens for the same id, at every call."""
    return tuple(
        token
        for each in ids
        for token in random_tokens(random.Random(f"{seed} id {each}"), tokens_per_id)
    )
