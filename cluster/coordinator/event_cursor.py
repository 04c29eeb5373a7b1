"""How far the coordinator has followed one engine's numbered batches, and what is missing.

    applied                     missing      waiting
    ... position-1, position |  +1, +2   |  +3, +4 ...    highest heard of

Batches come late, twice, out of order or never. They are applied in order only; those ahead of a
hole wait for it to close, by the missing batch or by a snapshot that covers it.
"""

from pageray.cluster.coordinator.messages import EventBatch


class EventCursor:
    """Keeps at most `max_waiting` batches: those with the highest numbers, since a snapshot that
    is still to come covers the low ones. A number that was let go is a hole again."""

    def __init__(self, max_waiting: int = 128) -> None:
        self._max_waiting = max_waiting
        self._position: int | None = None
        self._highest = 0
        self._waiting: dict[int, EventBatch] = {}

    @property
    def needs_snapshot(self) -> bool:
        """Nothing is known yet, or something between what is known and what was heard of."""
        return self._position is None or self._highest > self._position

    def hear_of(self, sequence_number: int) -> None:
        """The engine has sent a batch with this number, whether or not it has arrived."""
        self._highest = max(self._highest, sequence_number)

    def accept(self, batch: EventBatch) -> list[EventBatch]:
        """The batches to apply now, in order: none for a repeated or early one."""
        self.hear_of(batch.sequence_number)
        if self._position is None or batch.sequence_number > self._position:
            self._waiting[batch.sequence_number] = batch
        ready = self._take_ready()
        if len(self._waiting) > self._max_waiting:
            del self._waiting[min(self._waiting)]
        return ready

    def rebase(self, sequence_number: int) -> list[EventBatch] | None:
        """Start from a snapshot valid at this number: the batches to apply on top of it.

        None, and nothing has changed, when later batches than that have been applied already.
        """
        if self._position is not None and sequence_number < self._position:
            return None
        self.hear_of(sequence_number)
        self._position = sequence_number
        for number in [number for number in self._waiting if number <= sequence_number]:
            del self._waiting[number]
        return self._take_ready()

    def _take_ready(self) -> list[EventBatch]:
        ready: list[EventBatch] = []
        while self._position is not None and self._position + 1 in self._waiting:
            self._position += 1
            ready.append(self._waiting.pop(self._position))
        return ready
