"""Server-sent events, as OpenAI frames them (WHATWG HTML, section 9.2)."""

from collections.abc import Sequence

import msgspec

DONE = b"data: [DONE]\n\n"
MEDIA_TYPE = "text/event-stream"

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Proxies in between must pass events on at once."""


def event(data: bytes) -> bytes:
    """One event; `data` must hold no line break, which JSON as msgspec writes it never does."""
    return b"data: " + data + b"\n\n"


def events(structs: Sequence[msgspec.Struct]) -> bytes:
    """Several events in one piece: they leave in one write."""
    return b"".join(event(msgspec.json.encode(struct)) for struct in structs)
