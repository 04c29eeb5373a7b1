"""Engines that can share pages, in order of engine id, ready to be shown to a router."""

from bisect import insort
from operator import attrgetter

from pageray.cluster.coordinator.block_table import IncarnationId
from pageray.cluster.coordinator.engine_record import EngineRecord
from pageray.cluster.coordinator.messages import EngineView
from pageray.cluster.ids import EngineId

_BY_ID = attrgetter("info.engine_id")


class EngineGroup:
    """Keeps what a lookup needs by position, so that it touches only the engines that match.

    `refresh` must follow every change of a record.
    """

    def __init__(self) -> None:
        self._records: list[EngineRecord] = []
        self._views: list[EngineView] = []
        self._positions: dict[EngineId, int] = {}
        self._incarnations: list[IncarnationId] = []
        self._by_incarnation: dict[IncarnationId, int] = {}

    @property
    def records(self) -> list[EngineRecord]:
        return self._records

    def add(self, record: EngineRecord) -> None:
        insort(self._records, record, key=_BY_ID)
        self._index()

    def remove(self, record: EngineRecord) -> None:
        """Raises ValueError if it is not here."""
        self._records.remove(record)
        self._index()

    def refresh(self, record: EngineRecord) -> None:
        position = self._positions[record.info.engine_id]
        self._views[position] = record.view
        if self._incarnations[position] != record.incarnation:
            del self._by_incarnation[self._incarnations[position]]
            self._incarnations[position] = record.incarnation
            self._by_incarnation[record.incarnation] = position

    def views(self, runs: dict[IncarnationId, int]) -> tuple[EngineView, ...]:
        """All engines; `runs` has the matched blocks of those that match, and of others."""
        views = self._views.copy()
        for position, run in self._matching(runs):
            view = views[position]
            views[position] = EngineView(info=view.info, load=view.load, num_matched_blocks=run)
        return tuple(views)

    def holders(self, runs: dict[IncarnationId, int]) -> list[tuple[EngineRecord, int]]:
        """The engines that match, with their matched blocks."""
        return [(self._records[position], run) for position, run in self._matching(runs)]

    def check_invariants(self) -> None:
        assert self._records == sorted(self._records, key=_BY_ID)
        assert self._views == [record.view for record in self._records]
        assert self._incarnations == [record.incarnation for record in self._records]
        assert self._by_incarnation == {i: at for at, i in enumerate(self._incarnations)}
        assert self._positions == {r.info.engine_id: at for at, r in enumerate(self._records)}

    def _matching(self, runs: dict[IncarnationId, int]) -> list[tuple[int, int]]:
        positions = self._by_incarnation
        return [(positions[i], run) for i, run in runs.items() if i in positions]

    def _index(self) -> None:
        self._views = [record.view for record in self._records]
        self._positions = {r.info.engine_id: at for at, r in enumerate(self._records)}
        self._incarnations = [record.incarnation for record in self._records]
        self._by_incarnation = {i: at for at, i in enumerate(self._incarnations)}
