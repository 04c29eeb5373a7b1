"""Destination side bookkeeping of transfers: what is expected, what has arrived. Thread-safe.

    expect --> open --(every write counted)--> complete --close--> gone
                 |---(a wrong checksum)------> failed ---close--> gone
                 `---(time is over: close)--------------------> gone

Receivers of this process (socket, gRPC, process group) write a page only with a permit of its
`Landing`; `close` waits for the permits that are out and grants none afterwards.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

from pageray.cluster.ids import BlockId, TransferId
from pageray.workers.transfer.landing import ExpectedWrites, Landing
from pageray.workers.transfer.mapped_pages import EnginePages, check_span
from pageray.workers.transfer.page_write import PageSpan, plan_spans


class Expectation:
    """One transfer that is to arrive."""

    def __init__(self, writes: ExpectedWrites) -> None:
        self._writes = writes

    @property
    def outcome(self) -> Future[bool]:
        """True: every write arrived. False: the transfer failed or was closed. Not cancellable;
        for asyncio: `asyncio.wrap_future`, shielded."""
        return self._writes.outcome

    @property
    def failure(self) -> str | None:
        """Why it failed, for the log; None while it has not."""
        return self._writes.failure

    @property
    def num_counted(self) -> int:
        return self._writes.num_counted

    def wait(self, timeout_s: float) -> bool:
        """Whether every write has arrived, within `timeout_s`. Its bytes are then final."""
        try:
            return self.outcome.result(timeout_s)
        except FutureTimeoutError:
            return False


class Arrivals:
    """Every transfer that is to arrive in the pools of one engine."""

    def __init__(self, pages: EnginePages, *, with_checksums: bool = True) -> None:
        """`with_checksums`: writes without a checksum are refused. Off: checksums are ignored."""
        self.pages = pages
        self.with_checksums = with_checksums
        self._lock = threading.Lock()
        self._open: dict[TransferId, ExpectedWrites] = {}

    def expect(
        self,
        transfer_id: TransferId,
        destination_blocks: Sequence[BlockId],
        layer_ranges: Sequence[tuple[int, int]] | None = None,
    ) -> Expectation:
        """Open a transfer into these blocks, which the caller holds until `close` has returned.

        Writes are numbered as in `plan_writes`. Raises ValueError when a span is outside the
        pool or named twice, or the transfer is open already.
        """
        spans = plan_spans(destination_blocks, self.pages.layout.num_layers, layer_ranges)
        for span in spans:
            check_span(self.pages, span)
        if len(set(spans)) != len(spans):
            raise ValueError(f"transfer {transfer_id} names a block twice: {destination_blocks}.")
        writes = ExpectedWrites(self.pages, spans)
        with self._lock:
            if transfer_id in self._open:
                raise ValueError(f"transfer {transfer_id} is open already.")
            self._open[transfer_id] = writes
        return Expectation(writes)

    def begin(
        self, transfer_id: TransferId, indices: Sequence[int], spans: Sequence[PageSpan]
    ) -> Landing | None:
        """For a receiver: some writes are about to arrive. None: throw their bytes away.

        Raises `UnexpectedWriteError` when the transfer is open but did not ask for that.
        """
        writes = self._find(transfer_id)
        return None if writes is None else writes.begin(indices, spans)

    def confirm(
        self, transfer_id: TransferId, indices: Sequence[int], checksums: Sequence[int]
    ) -> bool:
        """Count writes whose bytes the source has put into the pools itself (shared memory, NIXL).

        `checksums` are those of the source, by position, and empty when they are off. False when
        the transfer is closed, has failed, or fails now because the bytes are not what was sent.
        Raises `UnexpectedWriteError` for an index that was not expected.
        """
        writes = self._find(transfer_id)
        if writes is None:
            return False
        landing = writes.begin(indices, writes.spans_at(indices))
        return landing.finish(self._checked(checksums))

    def _checked(self, checksums: Sequence[int]) -> Sequence[int] | None:
        return checksums if self.with_checksums else None

    def close(self, transfer_id: TransferId) -> None:
        """Forget the transfer. From now on no receiver of this process writes a byte of it."""
        with self._lock:
            writes = self._open.pop(transfer_id, None)
        if writes is not None:
            writes.close()

    def _find(self, transfer_id: TransferId) -> ExpectedWrites | None:
        with self._lock:
            return self._open.get(transfer_id)
