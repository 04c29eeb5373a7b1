"""The cluster's block table and its engines: who lives, what each holds, how busy it is.

Pure: time comes in as `now_s`, from one clock that never goes back. Nothing here is lost for good:
whatever the coordinator does not know, it asks an engine for in its next `EngineReply`, so that
once messages get through its table equals what the engines hold.

Whatever an engine says under a newer epoch voids what it said before. Only registering and
heartbeats keep it alive: events alone may come from an engine that no longer gets anything done.
"""

from pageray.cluster.coordinator.block_table import ClusterBlockTable
from pageray.cluster.coordinator.engine_group import EngineGroup
from pageray.cluster.coordinator.engine_record import EngineRecord
from pageray.cluster.coordinator.leases import LeaseBook
from pageray.cluster.coordinator.messages import (
    EngineInfo,
    EngineReply,
    EventBatch,
    Heartbeat,
    Holder,
    Location,
    Snapshot,
)
from pageray.cluster.ids import BlockKey, EngineId, Epoch

DEFAULT_HEARTBEAT_TIMEOUT_S = 10.0
DEFAULT_LEASE_S = 30.0

# Entries looked at. Dead ones cost memory only, so an answer should not wait for them.
_SWEPT_PER_MESSAGE = 500
_SWEPT_PER_EXPIRY = 20_000

_MUST_REGISTER = EngineReply(must_register=True)
_IS_STALE = EngineReply(is_stale=True)


class Coordinator:
    """Engines by id, in groups that can share pages (equal root keys)."""

    def __init__(
        self,
        *,
        heartbeat_timeout_s: float = DEFAULT_HEARTBEAT_TIMEOUT_S,
        lease_s: float = DEFAULT_LEASE_S,
        first_lease_id: int = 1,
    ) -> None:
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._table = ClusterBlockTable()
        self._leases = LeaseBook(lease_s, first_lease_id)
        self._engines: dict[EngineId, EngineRecord] = {}
        # By root key.
        self._groups: dict[BlockKey, EngineGroup] = {}
        # No heartbeat can be overdue before this time.
        self._next_check_s = 0.0

    @property
    def table(self) -> ClusterBlockTable:
        return self._table

    @property
    def engines(self) -> list[EngineInfo]:
        """Those registered, in no order."""
        return [record.info for record in self._engines.values()]

    def register(self, info: EngineInfo, now_s: float) -> EngineReply:
        """Introduce an engine, or a new epoch of it. Repeated for one epoch, only a heartbeat.

        Asks for a snapshot: the engine may have served for long while no coordinator listened.
        """
        known = self._engines.get(info.engine_id)
        if known is not None and known.info.epoch > info.epoch:
            return _IS_STALE
        if known is None or known.info.epoch < info.epoch:
            self._forget(info.engine_id)
            known = EngineRecord(info, self._table)
            self._engines[info.engine_id] = known
            self._groups.setdefault(info.root_key, EngineGroup()).add(known)
        self._heard(known, now_s)
        return known.reply()

    def heartbeat(self, heartbeat: Heartbeat, now_s: float) -> EngineReply:
        known = self._known(heartbeat.engine_id, heartbeat.epoch)
        if isinstance(known, EngineReply):
            return known
        known.take_heartbeat(heartbeat)
        self._groups[known.info.root_key].refresh(known)
        self._heard(known, now_s)
        return known.reply()

    def apply(self, batch: EventBatch) -> EngineReply:
        """Follow an engine's events. Repeated and early batches do no harm."""
        self._table.sweep(_SWEPT_PER_MESSAGE)
        known = self._known(batch.engine_id, batch.epoch)
        if isinstance(known, EngineReply):
            return known
        known.take_batch(batch)
        self._groups[known.info.root_key].refresh(known)
        return known.reply()

    def restore(self, snapshot: Snapshot) -> EngineReply:
        """Replace what is known of an engine's blocks, unless later events are known already."""
        self._table.sweep(_SWEPT_PER_MESSAGE)
        known = self._known(snapshot.engine_id, snapshot.epoch)
        if isinstance(known, EngineReply):
            return known
        known.take_snapshot(snapshot)
        self._groups[known.info.root_key].refresh(known)
        return known.reply()

    def deregister(self, engine_id: EngineId, epoch: Epoch) -> None:
        """Forget an engine and all it said, its numbers included; if a newer epoch of it is
        known, nothing happens."""
        known = self._engines.get(engine_id)
        if known is not None and known.info.epoch <= epoch:
            self._forget(engine_id)

    def locate(self, root_key: BlockKey, keys: tuple[BlockKey, ...], now_s: float) -> Location:
        """Every live engine with this root key and how much of the chain `keys` it holds."""
        self._drop_overdue(now_s)
        group = self._groups.get(root_key)
        if group is None:
            return Location(engines=())
        return Location(engines=group.views(self._table.longest_runs(keys)))

    def best_holder(
        self,
        root_key: BlockKey,
        keys: tuple[BlockKey, ...],
        *,
        min_blocks: int,
        exclude: EngineId,
        now_s: float,
    ) -> Holder | None:
        """The engine to pull from: the longest run, then the fewest leases, then the lowest id.

        The caller holds the returned lease until `end_lease`, or its time is up. None when nobody
        who can be pulled from, other than `exclude`, holds `min_blocks` (at least one).
        """
        self._drop_overdue(now_s)
        group = self._groups.get(root_key)
        if group is None:
            return None
        best: tuple[int, int, EngineId] | None = None
        for record, run in group.holders(self._table.longest_runs(keys)):
            engine_id = record.info.engine_id
            if run < max(1, min_blocks) or engine_id == exclude or record.info.endpoint is None:
                continue
            candidate = (-run, self._leases.count(engine_id), engine_id)
            best = candidate if best is None else min(best, candidate)
        if best is None:
            return None
        return Holder(
            lease_id=self._leases.begin(best[2], now_s),
            info=self._engines[best[2]].info,
            num_matched_blocks=-best[0],
        )

    def end_lease(self, lease_id: int) -> None:
        """No harm if it has ended already."""
        self._leases.end(lease_id)

    def expire(self, now_s: float) -> None:
        """Drop engines that have been silent too long and leases past their time; sweep a bit."""
        self._table.sweep(_SWEPT_PER_EXPIRY)
        self._drop_overdue(now_s)

    def blocks_held(self, engine_id: EngineId) -> set[int]:
        """Hints of the blocks an engine is known to hold (slow). KeyError when it is unknown."""
        return self._table.hints_held(self._engines[engine_id].incarnation)

    def check_invariants(self) -> None:
        """Assert that engines, groups, leases and table agree (slow)."""
        grouped = [record for group in self._groups.values() for record in group.records]
        assert {id(record) for record in grouped} == {id(r) for r in self._engines.values()}
        assert len(grouped) == len(self._engines)
        for root_key, group in self._groups.items():
            assert group.records, "an empty group is kept"
            assert all(record.info.root_key == root_key for record in group.records)
            group.check_invariants()
        self._leases.check_invariants()
        self._table.check_invariants()

    def _known(self, engine_id: EngineId, epoch: Epoch) -> EngineRecord | EngineReply:
        """The record of this epoch, or the reply to give when there is none."""
        known = self._engines.get(engine_id)
        if known is None:
            return _MUST_REGISTER
        if known.info.epoch > epoch:
            return _IS_STALE
        if known.info.epoch < epoch:
            self._forget(engine_id)
            return _MUST_REGISTER
        return known

    def _drop_overdue(self, now_s: float) -> None:
        self._leases.expire(now_s)
        if now_s < self._next_check_s:
            return
        overdue_s = now_s - self._heartbeat_timeout_s
        for record in [r for r in self._engines.values() if r.last_heard_s <= overdue_s]:
            self._forget(record.info.engine_id)
        oldest_s = min((r.last_heard_s for r in self._engines.values()), default=now_s)
        self._next_check_s = oldest_s + self._heartbeat_timeout_s

    def _heard(self, record: EngineRecord, now_s: float) -> None:
        record.last_heard_s = max(record.last_heard_s, now_s)

    def _forget(self, engine_id: EngineId) -> None:
        record = self._engines.pop(engine_id, None)
        if record is None:
            return
        record.close()
        self._leases.end_all_of(engine_id)
        group = self._groups[record.info.root_key]
        group.remove(record)
        if not group.records:
            del self._groups[record.info.root_key]
