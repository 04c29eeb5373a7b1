"""Ways into other engines' pools, kept open: mapping a pool or connecting takes longer than using it."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from pageray.cluster.ids import EngineId, Epoch
from pageray.workers.page_service.messages import PushRequest, TransportName
from pageray.workers.transfer.page_writer import PageWriter, TransferError, TransferStoppedError

MAX_WRITERS = 64

OpenWriter = Callable[[PushRequest], PageWriter]

_Key = tuple[EngineId, Epoch, TransportName]


@dataclass
class _Entry:
    writer: PageWriter
    lock: threading.Lock = field(default_factory=threading.Lock)
    """A writer does one write at a time."""
    is_broken: bool = False


class WriterCache:
    """Thread-safe. The least recently used writer is closed when there are too many."""

    def __init__(self, open_writer: OpenWriter, max_writers: int = MAX_WRITERS) -> None:
        self._open_writer = open_writer
        self._max_writers = max_writers
        self._lock = threading.Lock()
        self._entries: OrderedDict[_Key, _Entry] = OrderedDict()

    @contextmanager
    def borrow(self, request: PushRequest) -> Generator[PageWriter]:
        """The writer to a request's destination, for one write. Raises `TransferError` when there
        is no way to it; one that failed is not used again."""
        destination = request.destination
        key: _Key = (destination.engine_id, destination.epoch, request.transport)
        entry = self._entry(key, request)
        with entry.lock:
            if entry.is_broken:
                raise TransferError(f"The connection to {destination.engine_id} broke.")
            try:
                yield entry.writer
            except TransferStoppedError:
                raise
            except BaseException:
                entry.is_broken = True
                self._drop(key, entry)
                raise

    def close(self) -> None:
        with self._lock:
            entries = list(self._entries.values())
            self._entries.clear()
        for entry in entries:
            _close(entry)

    def _entry(self, key: _Key, request: PushRequest) -> _Entry:
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
                return self._entries[key]
        try:
            entry = _Entry(self._open_writer(request))
        except (OSError, ValueError) as error:
            raise TransferError(f"No way to {key[0]} over {key[2]}: {error}") from error
        surplus: list[_Entry] = []
        with self._lock:
            if key in self._entries:
                surplus.append(entry)
                entry = self._entries[key]
            else:
                self._entries[key] = entry
                if len(self._entries) > self._max_writers:
                    surplus.append(self._entries.popitem(last=False)[1])
        for each in surplus:
            _close(each)
        return entry

    def _drop(self, key: _Key, entry: _Entry) -> None:
        with self._lock:
            if self._entries.get(key) is entry:
                del self._entries[key]
        entry.writer.close()


def _close(entry: _Entry) -> None:
    with entry.lock:
        if not entry.is_broken:
            entry.is_broken = True
            entry.writer.close()
