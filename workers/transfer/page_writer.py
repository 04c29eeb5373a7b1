"""What every transport offers to the engine that holds the pages."""

from collections.abc import Callable, Sequence
from typing import Protocol

from pageray.cluster.errors import ServerError
from pageray.cluster.ids import TransferId
from pageray.workers.transfer.page_write import PageWrite

ShouldStop = Callable[[], bool]
"""Asked between pages; True ends the write."""


class TransferError(ServerError):
    """A transfer did not get through. The destination recomputes; nothing else is lost."""


class TransferStoppedError(TransferError):
    """The write was told to stop."""


class PageWriter(Protocol):
    """Writes pages of this engine into another one's pools. One `write` at a time.

    When `write` has returned or raised, no byte of it is in flight any more on this side: what a
    receiver at the destination still holds it discards once the transfer is closed there.
    """

    def write(
        self, transfer_id: TransferId, writes: Sequence[PageWrite], should_stop: ShouldStop = ...
    ) -> list[int]:
        """Every write complete; the checksums of what was sent, in order of `writes`, or [] when
        checksums are off. Raises `TransferError`, also when the peer is dead, and ValueError
        before anything is sent when the writes name blocks or layers that are not there."""
        ...

    def close(self) -> None: ...


def never() -> bool:
    """The `ShouldStop` of a write that runs to its end."""
    return False


def check_stop(should_stop: ShouldStop, transfer_id: TransferId) -> None:
    """Raise `TransferStoppedError` if the write is to end."""
    if should_stop():
        raise TransferStoppedError(f"transfer {transfer_id} was stopped.")
