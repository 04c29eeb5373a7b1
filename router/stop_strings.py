"""Stop strings over a stream of text pieces."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StopResult:
    """`text` may be shown now; `stop` is the stop string that ended the sequence, if one did."""

    text: str
    stop: str | None = None


class StopStringFilter:
    """Cuts text before the first stop string, however the text is split into pieces.

    The first is the one whose last character comes first; among those that end together, the
    longest. Text that may be the beginning of a stop string is withheld until it is decided.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        """`include_stop`: the stop string itself is shown too. No stop string may be empty."""
        assert all(stops), "an empty stop string would stop everything"
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._withheld = ""

    def push(self, piece: str) -> StopResult:
        """Take the next piece. After a result with a `stop`, push nothing more."""
        if not self._stops:
            return StopResult(piece)
        text = self._withheld + piece
        match = self._first_match(text)
        if match is not None:
            self._withheld = ""
            start, stop = match
            end = start + len(stop) if self._include_stop else start
            return StopResult(text[:end], stop)
        safe = self._longest_safe(text)
        self._withheld = text[safe:]
        return StopResult(text[:safe])

    def release(self) -> str:
        """The withheld text, when the sequence has ended without a stop string."""
        text, self._withheld = self._withheld, ""
        return text

    def _first_match(self, text: str) -> tuple[int, str] | None:
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0:
                candidate = (start + len(stop), start, stop)
                best = candidate if best is None else min(best, candidate)
        return None if best is None else (best[1], best[2])

    def _longest_safe(self, text: str) -> int:
        """Length of the part of `text` that can belong to no stop string."""
        safe = len(text)
        for stop in self._stops:
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while start >= 0:
                if stop.startswith(text[start:]):
                    safe = min(safe, start)
                    break
                start = text.find(stop[0], start + 1)
        return safe
