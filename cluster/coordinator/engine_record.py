"""What the coordinator knows of one engine in one epoch."""

import math

from pageray.cluster.coordinator.block_table import ClusterBlockTable
from pageray.cluster.coordinator.event_cursor import EventCursor
from pageray.cluster.coordinator.messages import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    EngineInfo,
    EngineLoad,
    EngineReply,
    EngineView,
    EventBatch,
    Heartbeat,
    Snapshot,
)

_IN_STEP = EngineReply()
_MUST_SEND_SNAPSHOT = EngineReply(must_send_snapshot=True)


class EngineRecord:
    """Owns one incarnation of `table` at a time, until `close`."""

    def __init__(self, info: EngineInfo, table: ClusterBlockTable) -> None:
        self.info = info
        self.load = EngineLoad()
        self.view = EngineView(info=info, load=self.load)
        """As seen by whoever asks about a prompt of which it holds nothing."""
        self.last_heard_s = -math.inf
        self.incarnation = table.open()
        self._table = table
        self._cursor = EventCursor()
        self._load_number = 0

    def reply(self) -> EngineReply:
        return _MUST_SEND_SNAPSHOT if self._cursor.needs_snapshot else _IN_STEP

    def take_heartbeat(self, heartbeat: Heartbeat) -> None:
        self._cursor.hear_of(heartbeat.sequence_number)
        # Numbers never fall, so a lower one than before is an old heartbeat that took its time.
        if heartbeat.sequence_number >= self._load_number:
            self._load_number = heartbeat.sequence_number
            self.load = heartbeat.load
            self.view = EngineView(info=self.info, load=self.load)

    def take_batch(self, batch: EventBatch) -> None:
        self._apply(self._cursor.accept(batch))

    def take_snapshot(self, snapshot: Snapshot) -> None:
        later = self._cursor.rebase(snapshot.sequence_number)
        if later is None:
            return
        self._start_over()
        self._table.store(self.incarnation, snapshot.keys)
        self._apply(later)

    def close(self) -> None:
        """Its blocks are gone from the table; the record must not be used again."""
        self._table.drop(self.incarnation)

    def _apply(self, batches: list[EventBatch]) -> None:
        for batch in batches:
            for event in batch.events:
                match event:
                    case BlocksStored(keys=keys):
                        self._table.store(self.incarnation, keys)
                    case BlocksRemoved(keys=keys):
                        self._table.remove(self.incarnation, keys)
                    case CacheCleared():
                        self._start_over()

    def _start_over(self) -> None:
        self._table.drop(self.incarnation)
        self.incarnation = self._table.open()
