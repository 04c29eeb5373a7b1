"""An engine's blocks as other threads may use them: to read pages out, and to write pages in.

The engine's own thread schedules and runs steps. Transfers go on beside it and meet it only here,
under one lock that is never held while a step is computed.
"""

import threading
from collections.abc import Sequence as SequenceOf

from pageray.cluster.block_keys import BlockContent, BlockHasher
from pageray.cluster.block_pool import BlockPool
from pageray.cluster.coordinator.messages import BlockEvent
from pageray.cluster.generation import GenerateRequest
from pageray.cluster.ids import BlockKey, RequestId, TransferId
from pageray.cluster.page_exports import Export, ExportId, PageExports
from pageray.cluster.page_imports import Import, PageImports
from pageray.cluster.prefix_run import find_run
from pageray.cluster.scheduler import Scheduler
from pageray.cluster.step import FillingBlocks
from pageray.workers.ranks.executor import Executor


class EnginePages:
    """Every method may be called from any thread, but none while `lock` is held."""

    def __init__(
        self,
        scheduler: Scheduler,
        pool: BlockPool,
        hasher: BlockHasher,
        executor: Executor,
        paths: list[str | None],
    ) -> None:
        self.lock = threading.Lock()
        self.paths = paths
        """By rank: where its pages can be mapped on this host; None for device memory."""
        self._scheduler = scheduler
        self._pool = pool
        self._hasher = hasher
        self._executor = executor
        self._imports = PageImports(pool)
        self._exports = PageExports(pool)
        self._last_step_id = 0
        self._stepped = threading.Condition(self.lock)

    # --- called by the engine, which holds the lock ---------------------------------------------

    def acknowledged(self, step_id: int) -> None:
        self._last_step_id = step_id
        self._stepped.notify_all()

    def check_invariants(self) -> None:
        self._scheduler.check_invariants(self._imports.tables())

    def clear_prefix_cache(self) -> None:
        self._scheduler.clear_prefix_cache()
        self._imports.cache_was_cleared()

    # --- what is here ---------------------------------------------------------------------------

    def contents_of(self, request: GenerateRequest) -> list[BlockContent]:
        """The full blocks that a request could hit: all of its tokens but the last, which is
        always computed."""
        chain: list[BlockContent] = []
        self._hasher.extend(chain, request.known_token_ids[:-1], request.cache_salt)
        return chain

    def num_local_blocks(self, contents: SequenceOf[BlockContent]) -> int:
        """How many leading blocks of a chain could be hit now."""
        with self.lock:
            return len(find_run(self._pool, contents))

    def take_events(self) -> tuple[BlockEvent, ...] | None:
        """See `BlockEventLog.take`."""
        with self.lock:
            return self._pool.take_events()

    def take_snapshot(self) -> tuple[BlockKey, ...]:
        """Every published key; the events that led here are forgotten."""
        with self.lock:
            self._pool.take_events()
            return self._pool.published_keys()

    def wait_for_step(self, timeout_s: float) -> None:
        """Return after the next step, or after `timeout_s`."""
        with self.lock:
            self._stepped.wait(timeout_s)

    @property
    def num_transfers(self) -> int:
        """Imports and exports that have not ended, quarantined ones included."""
        return len(self._imports) + len(self._exports)

    # --- pages out ------------------------------------------------------------------------------

    def open_export(self, contents: SequenceOf[BlockContent], first: int) -> Export | None:
        """Pin `contents[first:]` as far as it is here; on return every rank has its bytes.

        See `PageExports.open`.
        """
        with self.lock:
            export = self._exports.open(contents, first)
            step_id = self._last_step_id
        if export is not None:
            try:
                self._executor.wait_until_written(step_id)
            except BaseException:
                self.close_export(export.export_id)
                raise
        return export

    def close_export(self, export_id: ExportId) -> None:
        with self.lock:
            self._exports.close(export_id)

    def pin_filling(self, request_id: RequestId) -> FillingBlocks | None:
        """Pin the blocks that the step in flight fills for a request, until `unpin`; see
        `Scheduler.filling_blocks`."""
        with self.lock:
            filling = self._scheduler.filling_blocks(request_id)
            for block_id in filling.block_ids if filling is not None else ():
                self._pool.pin(block_id)
        return filling

    def unpin(self, filling: FillingBlocks) -> None:
        with self.lock:
            for block_id in reversed(filling.block_ids):
                self._pool.unpin(block_id)

    def num_layers_written(self, step_id: int) -> int:
        """See `Executor.num_layers_written`."""
        return self._executor.num_layers_written(step_id)

    # --- pages in -------------------------------------------------------------------------------

    def begin_import(
        self, transfer_id: TransferId, contents: SequenceOf[BlockContent]
    ) -> Import | None:
        """Take blocks for what is not here; on return no rank writes to them any more.

        See `PageImports.begin`.
        """
        with self.lock:
            begun = self._imports.begin(transfer_id, contents, self._scheduler.num_spare_blocks)
            step_id = self._last_step_id
        if begun is not None:
            try:
                self._executor.wait_until_written(step_id)
            except BaseException:
                self.abort_import(transfer_id)
                self.settle_import(transfer_id)
                raise
        return begun

    def finish_import(self, transfer_id: TransferId, num_arrived: int) -> int:
        with self.lock:
            return self._imports.finish(transfer_id, num_arrived)

    def abort_import(self, transfer_id: TransferId) -> None:
        with self.lock:
            self._imports.abort(transfer_id)

    def settle_import(self, transfer_id: TransferId) -> None:
        with self.lock:
            self._imports.settle(transfer_id)
