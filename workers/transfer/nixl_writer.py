"""Pages by NIXL (UCX: RDMA, TCP, or plain copies on one host), written without a receiver.

As with shared memory the destination's process takes no part: the count travels in the source's
acknowledgement (`Arrivals.confirm`), and after an abort the blocks are free again only when the
source has said that its `write` has ended, or is dead. Nothing is encrypted or signed: private
networks only.
"""

import time
from collections.abc import Sequence

import numpy as np

from pageray.cluster.ids import TransferId
from pageray.workers.transfer.checksum import checksum_of
from pageray.workers.transfer.frame_batches import cut_into_frames
from pageray.workers.transfer.frames import MAX_WRITES
from pageray.workers.transfer.mapped_pages import ByteArray, check_span
from pageray.workers.transfer.nixl_api import Releasable
from pageray.workers.transfer.nixl_pools import NixlEndpoint, NixlPools
from pageray.workers.transfer.outgoing import OutgoingPages
from pageray.workers.transfer.page_write import PageWrite
from pageray.workers.transfer.page_writer import ShouldStop, TransferError, check_stop, never

DEFAULT_TIMEOUT_S = 30.0
_POLL_S = 50e-6
_NUM_STAGED = 4
"""Pages that are put together and then written at once."""


class NixlWriter:
    """A `PageWriter` over prepared descriptor lists: one descriptor per layer of each page."""

    def __init__(
        self,
        source: NixlPools,
        destination: NixlEndpoint,
        *,
        with_checksums: bool = True,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """`timeout_s`: for about two megabytes of pages, or one page.

        Raises `TransferError` when the destination cannot be reached.
        """
        self._source = source
        self._destination = destination
        self._with_checksums = with_checksums
        self._timeout_s = timeout_s
        layout = destination.layout
        self._outgoing = OutgoingPages(source.pages, layout)
        self._staging = self._stage()
        self._max_writes = _NUM_STAGED if self._staging else MAX_WRITES
        self._registration = source.register(list(self._staging.values()))
        try:
            peer = source.agent.add_remote_agent(destination.metadata)
            self._peer = peer.decode() if isinstance(peer, bytes) else peer
            self._lists = [self._prepare(rank) for rank in range(len(layout.shards))]
        except source.api.errors as error:
            raise TransferError(f"NIXL cannot reach the destination: {error!r}") from error

    def write(
        self, transfer_id: TransferId, writes: Sequence[PageWrite], should_stop: ShouldStop = never
    ) -> list[int]:
        self._outgoing.check(writes)
        for write in writes:
            check_span(
                self._destination, write.destination_span(self._destination.layout.num_layers)
            )
        checksums: list[int] = []
        for batch in cut_into_frames(self._destination.layout, writes, self._max_writes):
            check_stop(should_stop, transfer_id)
            parts = [self._outgoing.parts(write, place) for place, write in enumerate(batch)]
            try:
                self._post(batch)
            except self._source.api.errors as error:
                raise TransferError(f"transfer {transfer_id} by NIXL: {error!r}") from error
            if self._with_checksums:
                checksums += [checksum_of(part) for part in parts]
        return checksums

    def close(self) -> None:
        for local, remote in self._lists:
            local.release()
            remote.release()
        if self._registration is not None:
            self._source.agent.deregister_memory(self._registration)

    def _stage(self) -> dict[int, ByteArray]:
        """Memory for the destination ranks whose pages are put together here."""
        layout = self._destination.layout
        staging: dict[int, ByteArray] = {}
        for rank, source_rank in enumerate(self._outgoing.whole_rank_of):
            if source_rank is None:
                staging[rank] = np.zeros((_NUM_STAGED, layout.page_bytes(rank)), np.uint8)
                self._outgoing.stage_in(rank, staging[rank])
        return staging

    def _prepare(self, rank: int) -> tuple[Releasable, Releasable]:
        """The descriptors of one destination rank, here and there."""
        layout = self._destination.layout
        layer_bytes = layout.page_bytes(rank) // layout.num_layers
        source_rank = self._outgoing.whole_rank_of[rank]
        local = self._staging[rank] if source_rank is None else self._source.pages.rank(source_rank)
        return (
            self._source.prepare(None, local.ctypes.data, layer_bytes, local.nbytes // layer_bytes),
            self._source.prepare(
                self._peer,
                self._destination.addresses[rank],
                layer_bytes,
                (self._destination.num_blocks + 1) * layout.num_layers,
            ),
        )

    def _post(self, batch: Sequence[PageWrite]) -> None:
        """Write the pages of `batch` and wait until they lie at the destination."""
        transfers: list[Releasable] = []
        for rank, (local, remote) in enumerate(self._lists):
            transfer = self._source.agent.make_prepped_xfer(
                "WRITE", local, self._local_indices(rank, batch), remote, self._indices_of(batch)
            )
            transfers.append(transfer)
        try:
            self._run(transfers)
        finally:
            for transfer in transfers:
                self._release(transfer)

    def _indices_of(self, batch: Sequence[PageWrite]) -> list[int]:
        num_layers = self._destination.layout.num_layers
        spans = [write.destination_span(num_layers) for write in batch]
        return [
            span.block * num_layers + layer
            for span in spans
            for layer in range(span.layer_start, span.layer_end)
        ]

    def _local_indices(self, rank: int, batch: Sequence[PageWrite]) -> list[int]:
        num_layers = self._destination.layout.num_layers
        is_staged = self._outgoing.whole_rank_of[rank] is None
        indices: list[int] = []
        for place, write in enumerate(batch):
            block, start, end = write.source_span(num_layers)
            # Staged layers lie at the beginning of their place, whichever they are.
            first = place * num_layers if is_staged else block * num_layers + start
            indices += range(first, first + end - start)
        return indices

    def _run(self, transfers: Sequence[Releasable]) -> None:
        deadline_s = time.monotonic() + self._timeout_s
        agent = self._source.agent
        states = [agent.transfer(transfer) for transfer in transfers]
        for transfer, posted_state in zip(transfers, states, strict=True):
            state = posted_state
            while state == "PROC":
                if time.monotonic() > deadline_s:
                    raise TransferError(f"NIXL wrote nothing for {self._timeout_s} s.")
                time.sleep(_POLL_S)
                state = agent.check_xfer_state(transfer)
            if state != "DONE":
                raise TransferError(f"NIXL reports {state}.")

    def _release(self, transfer: Releasable) -> None:
        """Also cancels it. What cannot be cancelled ends with the connection."""
        try:
            transfer.release()
        except self._source.api.errors:
            self._source.agent.remove_remote_agent(self._peer)
