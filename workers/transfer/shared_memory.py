"""Pages between engines of one host: the source maps the destination's pools and writes into them.

The destination's process takes no part, so the count travels in the acknowledgement: the source
answers its peer with the checksums that `write` returned, and the destination passes them to
`Arrivals.confirm`. After an abort nothing at the destination can hold a late write back: its
blocks are free again when the source has said that `write` has ended (`Departures.cancel`), or
when the source's process is dead (`ProcessPulse`).
"""

from collections.abc import Sequence

from pageray.cluster.ids import TransferId
from pageray.workers.channel.pulse import ProcessPulse
from pageray.workers.transfer.checksum import checksum_of
from pageray.workers.transfer.mapped_pages import MappedPages, check_span
from pageray.workers.transfer.outgoing import OutgoingPages
from pageray.workers.transfer.page_write import PageWrite
from pageray.workers.transfer.page_writer import ShouldStop, TransferError, check_stop, never

_PAGES_PER_PULSE = 16
"""A look at the destination's pidfd costs as much as a few kilobytes."""


class SharedMemoryWriter:
    """A `PageWriter` by plain copies, which release the interpreter lock."""

    def __init__(
        self,
        source: MappedPages,
        destination: MappedPages,
        destination_pid: int,
        *,
        with_checksums: bool = True,
    ) -> None:
        """`destination_pid`: the process whose death makes a transfer pointless."""
        self._outgoing = OutgoingPages(source, destination.layout)
        self._destination = destination
        self._pulse = ProcessPulse(destination_pid, "the destination of a transfer")
        self._with_checksums = with_checksums

    def write(
        self, transfer_id: TransferId, writes: Sequence[PageWrite], should_stop: ShouldStop = never
    ) -> list[int]:
        self._outgoing.check(writes)
        for write in writes:
            check_span(
                self._destination, write.destination_span(self._destination.layout.num_layers)
            )
        checksums: list[int] = []
        for number, write in enumerate(writes):
            check_stop(should_stop, transfer_id)
            if number % _PAGES_PER_PULSE == 0 and not self._pulse.is_alive:
                raise TransferError(f"transfer {transfer_id}: the destination has ended.")
            checksums += self._write_page(write)
        return checksums

    def _write_page(self, write: PageWrite) -> list[int]:
        span = write.destination_span(self._destination.layout.num_layers)
        parts = self._outgoing.parts(write)
        for part, target in zip(parts, self._destination.parts(span), strict=True):
            target[:] = part
        return [checksum_of(parts)] if self._with_checksums else []

    def close(self) -> None:
        """Let go of the destination's pools and its pidfd."""
        self._pulse.close()
        self._destination.close()
