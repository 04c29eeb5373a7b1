"""Finds out when the blocks of a failed pull are safe to use again.

A receiver of this process has stopped when `Arrivals.close` has returned. A source that writes
into shared memory by itself must say so, or be dead.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from pageray.cluster.coordinator.messages import EngineInfo
from pageray.cluster.ids import TransferId
from pageray.workers.channel.pulse import ProcessPulse
from pageray.workers.page_service.messages import CancelRequest, TransportName
from pageray.workers.page_service.peers import Peers

logger = logging.getLogger(__name__)

RETRY_S = 0.2


@dataclass
class _Open:
    transfer_id: TransferId
    source: EngineInfo
    pulse: ProcessPulse


class Settler:
    """One thread, started on first need. `release` is called once per transfer, from any thread."""

    def __init__(
        self, info: EngineInfo, peers: Peers, release: Callable[[TransferId], None]
    ) -> None:
        self._info = info
        self._peers = peers
        self._release = release
        self._changed = threading.Condition()
        self._open: list[_Open] = []
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def settle_later(
        self, transfer_id: TransferId, source: EngineInfo, transport: TransportName
    ) -> None:
        """Release the transfer's blocks at once, or as soon as its writer is known to have stopped."""
        if transport != "shared_memory" or source.endpoint is None:
            self._release(transfer_id)
            return
        entry = _Open(transfer_id, source, ProcessPulse(source.endpoint.pid, "the source"))
        with self._changed:
            self._open.append(entry)
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(
                    target=self._run, name="pageray-settler", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def close(self) -> None:
        """Stop looking. Blocks that are still in quarantine stay there: the pool ends with them."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._open or self._is_closed)
                if self._is_closed:
                    return
                entries = list(self._open)
            settled = [entry for entry in entries if self._has_stopped(entry)]
            with self._changed:
                self._open = [entry for entry in self._open if entry not in settled]
            for entry in settled:
                entry.pulse.close()
                self._release(entry.transfer_id)
            with self._changed:
                if self._open and not settled:
                    self._changed.wait_for(lambda: self._is_closed, RETRY_S)

    def _has_stopped(self, entry: _Open) -> bool:
        if not entry.pulse.is_alive:
            return True
        request = CancelRequest(
            transfer_id=entry.transfer_id,
            source_epoch=entry.source.epoch,
            destination=self._info.engine_id,
            destination_epoch=self._info.epoch,
        )
        try:
            return self._peers.cancel(entry.source, request)
        except grpc.RpcError as error:
            logger.info("transfer %d may still be written: %s", entry.transfer_id, error)
            return False
