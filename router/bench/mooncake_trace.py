"""Mooncake's request traces, made small enough for small engines.

A row has `timestamp` (ms), `input_length` and `output_length` (tokens) and `hash_ids`, one for
each 512 tokens of the prompt: equal ids stand for equal tokens. What a trace says about sharing is
kept, and so is the pattern of arrivals; text there is none, so an id becomes random tokens.
"""

import random
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pageray.cluster.errors import ConfigError
from pageray.router.bench.routing_load import RoutingLoad, RoutingRequest, tokens_of_ids

TOKENS_PER_HASH_ID = 512
_FIRST_OF_ITS_OWN = 1
"""Nearly all prompts begin with the same id; conversations part at the second."""


class TraceRow(msgspec.Struct, frozen=True):
    timestamp: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class TraceScale:
    """How a trace is cut down."""

    num_requests: int
    length_divisor: int
    """Divides the prompts' lengths; 512 is a multiple of it."""
    max_prompt_len: int
    """Longer prompts lose their ends."""
    output_len: int
    seed: int = 0


def read_trace(path: Path) -> list[TraceRow]:
    """Raises `ConfigError` for a file that is no such trace."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"--trace {path} cannot be read: {error.strerror}.") from error
    decoder = msgspec.json.Decoder(TraceRow)
    try:
        rows = [decoder.decode(line) for line in lines if line.strip()]
    except msgspec.DecodeError as error:
        raise ConfigError(f"--trace {path} is no Mooncake trace: {error}.") from error
    if not rows or not all(row.hash_ids for row in rows):
        raise ConfigError(f"--trace {path} is no Mooncake trace: it has rows without hash_ids.")
    return rows


def trace_load(name: str, rows: list[TraceRow], scale: TraceScale) -> RoutingLoad:
    """Whole conversations drawn at random until there are `num_requests`, in order of arrival.

    Drawing single rows, or the first ones, would lose most of the sharing: the turns of a
    conversation are minutes apart.
    """
    if TOKENS_PER_HASH_ID % scale.length_divisor:
        raise ConfigError(
            f"The length divisor is {scale.length_divisor}; {TOKENS_PER_HASH_ID} must be a "
            "multiple of it."
        )
    drawn = _draw(rows, scale)
    requests = (
        RoutingRequest(arrival_s, _prompt(row, scale), scale.output_len)
        for arrival_s, row in zip(_arrivals_s(drawn), drawn, strict=True)
    )
    return RoutingLoad(name, tuple(requests))


def _draw(rows: list[TraceRow], scale: TraceScale) -> list[TraceRow]:
    conversations: dict[int, list[int]] = {}
    for position, row in enumerate(rows):
        own = row.hash_ids[min(_FIRST_OF_ITS_OWN, len(row.hash_ids) - 1)]
        conversations.setdefault(own, []).append(position)
    shuffled = list(conversations.values())
    random.Random(f"{scale.seed} conversations").shuffle(shuffled)
    drawn: list[int] = []
    for conversation in shuffled:
        drawn += conversation[: scale.num_requests - len(drawn)]
    return [rows[position] for position in sorted(drawn)]


def _prompt(row: TraceRow, scale: TraceScale) -> tuple[int, ...]:
    length = max(1, row.input_length // scale.length_divisor)
    length = min(length, scale.max_prompt_len)
    per_id = TOKENS_PER_HASH_ID // scale.length_divisor
    ids = row.hash_ids[: -(-length // per_id)]
    return tokens_of_ids(scale.seed, ids, per_id)[:length]


def _arrivals_s(rows: list[TraceRow]) -> list[float]:
    """Seconds after the first row. Rows of one time stamp are spread over the time to the next:
    one of the traces counts in steps of 3 s."""
    stamps = [row.timestamp / 1e3 for row in rows]
    arrivals_s: list[float] = []
    for position, stamp in enumerate(stamps):
        first = stamps.index(stamp)
        count = stamps.count(stamp)
        following = stamps[first + count] if first + count < len(stamps) else stamp
        arrivals_s.append(stamp + (following - stamp) * (position - first) / count - stamps[0])
    return arrivals_s
