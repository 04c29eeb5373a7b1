"""What changed about an engine's published blocks, in order, for whoever keeps a wider table."""

from pageray.cluster.coordinator.messages import (
    BlockEvent,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
)
from pageray.cluster.ids import BlockKey

MAX_PENDING_KEYS = 1 << 17
"""More than this and nobody is listening; whoever comes later wants a snapshot anyway."""


class BlockEventLog:
    """Collects events until they are taken. Runs of one kind become one event."""

    def __init__(self, max_pending_keys: int = MAX_PENDING_KEYS) -> None:
        self._max_pending = max_pending_keys
        self._num_pending = 0
        self._events: list[BlockEvent] = []
        self._run: list[BlockKey] = []
        self._is_stored_run = True

    def stored(self, key: BlockKey) -> None:
        self._add(key, is_stored=True)

    def removed(self, key: BlockKey) -> None:
        self._add(key, is_stored=False)

    def cleared(self) -> None:
        """Whatever was said before does not matter any more."""
        self._forget()
        self._events.append(CacheCleared())

    def take(self) -> tuple[BlockEvent, ...] | None:
        """The events since the last call, which are forgotten here.

        None when there were too many to keep: the reader needs all published keys instead.
        """
        has_overflowed = self._num_pending > self._max_pending
        self._close_run()
        events = tuple(self._events)
        self._forget()
        return None if has_overflowed else events

    def _add(self, key: BlockKey, *, is_stored: bool) -> None:
        self._num_pending += 1
        if self._num_pending > self._max_pending:
            self._events, self._run = [], []
            return
        if is_stored is not self._is_stored_run:
            self._close_run()
            self._is_stored_run = is_stored
        self._run.append(key)

    def _close_run(self) -> None:
        if self._run:
            kind = BlocksStored if self._is_stored_run else BlocksRemoved
            self._events.append(kind(tuple(self._run)))
            self._run = []

    def _forget(self) -> None:
        self._events, self._run, self._num_pending = [], [], 0
