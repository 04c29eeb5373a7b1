"""One sender's line: all that is being sent gets an equal share of it."""

import itertools
from dataclasses import dataclass

from pageray.cluster.simulation.event_loop import EventLoop, Future


@dataclass(slots=True)
class _Sending:
    left_bytes: float
    done: Future[None]


class SharedLine:
    def __init__(self, loop: EventLoop, bytes_per_s: float) -> None:
        self._loop = loop
        self._bytes_per_s = bytes_per_s
        self._sending: dict[int, _Sending] = {}
        self._numbers = itertools.count(1)
        self._as_of_s = 0.0
        self._plan_number = 0

    def send(self, num_bytes: int) -> tuple[int, Future[None]]:
        """(a number to `stop` it with, what is done when the bytes are there)."""
        self._advance()
        number = next(self._numbers)
        self._sending[number] = _Sending(num_bytes, Future())
        done = self._sending[number].done
        self._plan()
        return number, done

    def stop(self, number: int) -> None:
        """Nothing more of it is sent, and it is never done. No harm if it has been."""
        self._advance()
        self._sending.pop(number, None)
        self._plan()

    def _advance(self) -> None:
        now_s = self._loop.now_s
        if self._sending:
            sent = (now_s - self._as_of_s) * self._bytes_per_s / len(self._sending)
            for each in self._sending.values():
                each.left_bytes -= sent
        self._as_of_s = now_s

    def _plan(self) -> None:
        """Look again when the first of them is done, unless something changes before."""
        self._plan_number += 1
        if not self._sending:
            return
        number = self._plan_number
        least = min(each.left_bytes for each in self._sending.values())
        wait_s = max(0.0, least) * len(self._sending) / self._bytes_per_s
        self._loop.after(wait_s, lambda: self._end(number))

    def _end(self, plan_number: int) -> None:
        if plan_number != self._plan_number:
            return
        self._advance()
        # Less than a byte is rounding.
        ended = [n for n, each in self._sending.items() if each.left_bytes < 1.0]
        done = [self._sending.pop(number).done for number in ended]
        self._plan()
        for each in done:
            each.set_result(None)
