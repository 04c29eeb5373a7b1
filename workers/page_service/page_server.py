"""The holder's side: pages of this engine, pushed to engines that ask for them."""

import logging
from collections.abc import Callable, Iterator

import grpc
import msgspec

from pageray.cluster.coordinator.messages import EngineInfo
from pageray.cluster.errors import PageRayError
from pageray.workers.engine_pages import EnginePages
from pageray.workers.page_service.messages import (
    CancelReply,
    PushEnd,
    PushMessage,
    PushRequest,
    decode_cancel_request,
    decode_push_request,
    encode,
)
from pageray.workers.page_service.prefill_job import PrefillRunner
from pageray.workers.page_service.push import Push, SendWrites
from pageray.workers.page_service.writer_cache import WriterCache
from pageray.workers.transfer.departures import Departure, Departures
from pageray.workers.transfer.page_write import PageWrite
from pageray.workers.transfer.page_writer import TransferError

logger = logging.getLogger(__name__)

CANCEL_WAIT_S = 0.5


class PageServer:
    """Handlers of the control service; each call runs in a thread of the gRPC server."""

    def __init__(
        self,
        info: EngineInfo,
        pages: EnginePages,
        writers: WriterCache,
        prefills: PrefillRunner | None = None,
    ) -> None:
        """`prefills` None: only what is here already is pushed."""
        self._info = info
        self._pages = pages
        self._writers = writers
        self._prefills = prefills
        self._departures = Departures()

    def push(self, data: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        """The messages of one push. Ends early when the caller has gone."""
        try:
            request = decode_push_request(data)
        except msgspec.DecodeError as error:
            yield encode(PushEnd(failure=f"the request is none: {error}"))
            return
        try:
            for message in self._push(request, context.is_active):
                yield encode(message)
        except PageRayError as error:
            yield encode(PushEnd(failure=str(error)))
        except Exception as error:  # process boundary: the peer is told, the log has the traceback
            logger.exception("push %d to %s failed", request.transfer_id, request.destination)
            yield encode(PushEnd(failure=f"{type(error).__name__}: {error}"))

    def cancel(self, data: bytes, context: grpc.ServicerContext) -> bytes:
        """Stop a push for good; see `CancelReply`."""
        request = decode_cancel_request(data)
        if request.source_epoch != self._info.epoch:
            # What the old epoch was writing ended with its process.
            return encode(CancelReply(is_stopped=True))
        departure = (request.destination, request.destination_epoch, request.transfer_id)
        return encode(CancelReply(self._departures.cancel(departure, CANCEL_WAIT_S)))

    def _push(self, request: PushRequest, is_wanted: Callable[[], bool]) -> Iterator[PushMessage]:
        refusal = self._refusal(request)
        if refusal is not None:
            yield PushEnd(failure=refusal)
            return
        push = Push(request, self._pages, self._sender(request, is_wanted))
        if request.compute is None:
            yield from push.what_is_here()
        elif self._prefills is None:
            raise TransferError(f"{self._info.engine_id} computes nothing for others.")
        else:
            yield from push.while_computing(
                self._prefills.start_prefill(request.compute), is_wanted
            )

    def _sender(self, request: PushRequest, is_wanted: Callable[[], bool]) -> SendWrites:
        destination = request.destination
        departure: Departure = (destination.engine_id, destination.epoch, request.transfer_id)

        def send(batch: list[PageWrite]) -> tuple[int, ...]:
            with (
                self._departures.writing(departure) as is_cancelled,
                self._writers.borrow(request) as writer,
            ):
                checksums = writer.write(
                    request.transfer_id, batch, lambda: is_cancelled() or not is_wanted()
                )
            # A receiver at the destination has compared them itself.
            return tuple(checksums) if request.transport == "shared_memory" else ()

        return send

    def _refusal(self, request: PushRequest) -> str | None:
        ours, theirs = self._info, request.destination
        if (request.source, request.source_epoch) != (ours.engine_id, ours.epoch):
            return f"this is {ours.engine_id} in epoch {ours.epoch}, not {request.source_epoch}."
        if theirs.root_key != ours.root_key:
            return f"{theirs.engine_id} serves another model, or keeps its pages differently."
        return None
