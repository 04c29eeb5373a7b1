"""Whether a process still lives, told by the kernel (pidfd) rather than by asking it."""

import os
import select

from pageray.workers.channel.mailbox import PeerDeadError


class ProcessPulse:
    """Watches one process of this host. A pidfd names the process itself: a reused process id
    cannot be mistaken for it."""

    def __init__(self, pid: int, what: str) -> None:
        self._what = f"{what} (process {pid})"
        try:
            self._pidfd: int | None = os.pidfd_open(pid)
        except ProcessLookupError:
            self._pidfd = None

    @property
    def is_alive(self) -> bool:
        if self._pidfd is None:
            return False
        # A pidfd becomes readable when its process ends.
        return not select.select([self._pidfd], [], [], 0)[0]

    def __call__(self) -> None:
        """Raise `PeerDeadError` if the process has ended."""
        if not self.is_alive:
            raise PeerDeadError(f"{self._what} has ended.")

    def close(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
