"""The writes of one transfer, each counted once, and the right to put bytes into its pages."""

import threading
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

from pageray.workers.transfer.checksum import checksum_of
from pageray.workers.transfer.mapped_pages import ByteArray, EnginePages
from pageray.workers.transfer.page_write import PageSpan


class UnexpectedWriteError(Exception):
    """A source wants to write what this transfer did not ask for: it is not to be trusted."""


class ExpectedWrites:
    """State of one open transfer: per write, who is bringing it and whether it has been counted."""

    def __init__(self, pages: EnginePages, spans: Sequence[PageSpan]) -> None:
        self.pages = pages
        self._spans = spans
        self._counted = bytearray(len(spans))
        self._owners: dict[int, Landing] = {}
        self._num_permits = 0
        self._is_closed = False
        self._changed = threading.Condition()
        self.num_counted = 0
        self.failure: str | None = None
        self.outcome: Future[bool] = Future()
        self.outcome.set_running_or_notify_cancel()
        if not spans:
            self.outcome.set_result(True)

    def spans_at(self, indices: Sequence[int]) -> list[PageSpan]:
        """Raises `UnexpectedWriteError` for an index outside the transfer."""
        for index in indices:
            if not 0 <= index < len(self._spans):
                raise UnexpectedWriteError(f"write {index} of a transfer of {len(self._spans)}.")
        return [self._spans[index] for index in indices]

    def begin(self, indices: Sequence[int], spans: Sequence[PageSpan]) -> "Landing":
        """The newest bringer of a write is the one that counts; a write that has been counted is
        never touched again."""
        if self.spans_at(indices) != list(spans):
            raise UnexpectedWriteError(
                f"writes {list(indices)[:8]} are for {self.spans_at(indices)[:8]}, not "
                f"{list(spans)[:8]}."
            )
        with self._changed:
            fresh = [index for index in indices if not self._counted[index]]
            landing = Landing(self, indices, frozenset(fresh))
            for index in fresh:
                self._owners[index] = landing
        return landing

    @contextmanager
    def permit(self, landing: "Landing") -> Generator[bool, None, None]:
        """Whether `landing` may write to its pages while this lasts; keep it short."""
        with self._changed:
            is_granted = self._may_write(landing)
            self._num_permits += is_granted
        try:
            yield is_granted
        finally:
            if is_granted:
                with self._changed:
                    self._num_permits -= 1
                    if self._is_closed and not self._num_permits:
                        self._changed.notify_all()

    def count(self, landing: "Landing") -> bool:
        """The bytes of `landing` are in place and right."""
        with self._changed:
            if not self._may_write(landing):
                return False
            for index in landing.fresh:
                self._counted[index] = 1
                del self._owners[index]
            self.num_counted += len(landing.fresh)
            is_complete = self.num_counted == len(self._spans)
        if is_complete:
            self._settle(None)
        return True

    def fail(self, landing: "Landing", reason: str) -> None:
        """Bytes are not what was sent; from a bringer that has been overtaken it means nothing."""
        with self._changed:
            is_ours = self._may_write(landing)
        if is_ours:
            self._settle(reason)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.wait_for(lambda: not self._num_permits)
        self._settle("the transfer was closed.")

    def _may_write(self, landing: "Landing") -> bool:
        return (
            not self._is_closed
            and self.failure is None
            and all(self._owners.get(index) is landing for index in landing.fresh)
        )

    def _settle(self, failure: str | None) -> None:
        with self._changed:
            if self.outcome.done():
                return
            self.failure = failure
            # Callbacks run here; the condition's lock is re-entrant, so they may look at us.
            self.outcome.set_result(failure is None)


class Landing:
    """Some writes of one transfer on their way into the pools, brought by one receiver."""

    def __init__(
        self, writes: ExpectedWrites, indices: Sequence[int], fresh: frozenset[int]
    ) -> None:
        self._writes = writes
        self._indices = indices
        self.fresh = fresh
        """Indices that had not been counted when this began; the others are thrown away."""

    def targets(self) -> list[list[ByteArray] | None]:
        """Per write, where its bytes go in wire order; None: nowhere, it has been counted."""
        spans = self._writes.spans_at(self._indices)
        return [
            self._writes.pages.parts(span) if index in self.fresh else None
            for index, span in zip(self._indices, spans, strict=True)
        ]

    @contextmanager
    def permit(self) -> Generator[bool, None, None]:
        """Around every copy into the pages: only if it yields True."""
        with self._writes.permit(self) as is_granted:
            yield is_granted

    def finish(self, checksums: Sequence[int] | None) -> bool:
        """Compare what lies in the pages with the source's checksums, by position, and count.

        None: do not compare. True: all writes of this landing are counted, now or before. False:
        the transfer is closed, has failed or fails now, or another landing took a write over.
        """
        if checksums is not None:
            damaged = self._damaged(checksums)
            if damaged is not None:
                self._writes.fail(self, f"the checksum of write {damaged} is wrong.")
                return False
        return self._writes.count(self)

    def _damaged(self, checksums: Sequence[int]) -> int | None:
        if len(checksums) != len(self._indices):
            raise UnexpectedWriteError(
                f"{len(checksums)} checksums came with {len(self._indices)} writes."
            )
        targets = self.targets()
        for index, target, checksum in zip(self._indices, targets, checksums, strict=True):
            if target is not None and checksum_of(target) != checksum:
                return index
        return None
