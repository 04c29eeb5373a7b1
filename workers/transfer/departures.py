"""Source side bookkeeping: which transfers this engine is writing now, and how to stop one.

A destination that aborts asks its source to cancel. A yes means: nothing of this transfer is in
flight from here, and nothing ever will be. Only then, or when the source is dead, may the
destination give the blocks to somebody else (transports that write without a receiver).
"""

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager

from pageray.cluster.ids import EngineId, Epoch, TransferId
from pageray.workers.transfer.page_writer import ShouldStop, TransferStoppedError

Departure = tuple[EngineId, Epoch, TransferId]
"""A transfer as its source names it: transfer ids are unique for the destination only."""


class Departures:
    """Thread-safe. A transfer may be written by several threads at once."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_running: dict[Departure, int] = {}
        self._cancelled: set[Departure] = set()

    @contextmanager
    def writing(self, departure: Departure) -> Generator[ShouldStop, None, None]:
        """Around every `PageWriter.write` of the transfer, which gets the `ShouldStop`.

        Raises `TransferStoppedError` when the transfer was cancelled before.
        """
        with self._changed:
            if departure in self._cancelled:
                raise TransferStoppedError(f"transfer {departure[2]} was cancelled.")
            self._num_running[departure] = self._num_running.get(departure, 0) + 1
        try:
            yield lambda: departure in self._cancelled
        finally:
            with self._changed:
                self._num_running[departure] -= 1
                if not self._num_running[departure]:
                    del self._num_running[departure]
                self._changed.notify_all()

    def cancel(self, departure: Departure, timeout_s: float) -> bool:
        """Stop the transfer and refuse it from now on. False: still being written after
        `timeout_s`; ask again."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            self._cancelled.add(departure)
            return self._changed.wait_for(
                lambda: departure not in self._num_running, deadline_s - time.monotonic()
            )

    def forget_engine(self, engine_id: EngineId) -> None:
        """The destination is gone for good: its cancelled transfers need no memory any more."""
        with self._changed:
            self._cancelled = {gone for gone in self._cancelled if gone[0] != engine_id}
