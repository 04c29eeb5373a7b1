"""The destination's side: pages that another engine has, brought into this one's pool.

A pull ends in one of three ways, and always within its deadline: the blocks are published here;
nothing was there to pull; or it failed, and its blocks stay in quarantine until nobody can be
writing to them any more.
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from pageray.cluster.block_keys import BlockContent
from pageray.cluster.coordinator.messages import EngineInfo
from pageray.cluster.generation import GenerateRequest
from pageray.cluster.ids import TransferId
from pageray.workers.engine_pages import EnginePages
from pageray.workers.page_service.layer_groups import layer_groups
from pageray.workers.page_service.messages import (
    PushedPart,
    PushEnd,
    PushRequest,
    TransportName,
    decode_push_message,
    encode,
)
from pageray.workers.page_service.peers import Peers
from pageray.workers.page_service.settler import Settler
from pageray.workers.transfer.arrivals import Arrivals, Expectation
from pageray.workers.transfer.landing import UnexpectedWriteError
from pageray.workers.transfer.page_writer import TransferError

logger = logging.getLogger(__name__)

COMPUTE_LAYER_GROUPS = 3
"""Pages of a prompt that is being computed come in so many groups of layers, each on its way
while the next is computed."""


@dataclass(frozen=True, kw_only=True)
class PullOutcome:
    """What came of a pull. `failure` None and no blocks: nothing was there to pull."""

    num_blocks: int = 0
    num_computed_blocks: int = 0
    """Those of them that were computed for this pull."""
    num_bytes: int = 0
    seconds: float = 0.0
    failure: str | None = None


class PullCancel:
    """Ends a pull from another thread, before or while it runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_set = False
        self._end_call: Callable[[], object] | None = None

    def set(self) -> None:
        with self._lock:
            self._is_set = True
            end_call = self._end_call
        if end_call is not None:
            end_call()

    def watch(self, end_call: Callable[[], object]) -> None:
        """`end_call` is run when the pull is cancelled, at once if it has been."""
        with self._lock:
            self._end_call = end_call
            is_set = self._is_set
        if is_set:
            end_call()


class Puller:
    """Thread-safe; every pull runs in its caller's thread."""

    def __init__(
        self,
        info: EngineInfo,
        *,
        pages: EnginePages,
        arrivals: Arrivals,
        peers: Peers,
        settler: Settler,
    ) -> None:
        self._info = info
        self._pages = pages
        self._arrivals = arrivals
        self._peers = peers
        self._settler = settler
        self._ids = itertools.count(1)

    def pull(
        self,
        contents: list[BlockContent],
        source: EngineInfo,
        *,
        transport: TransportName,
        timeout_s: float,
        cancel: PullCancel,
        compute: GenerateRequest | None = None,
    ) -> PullOutcome:
        """Bring what `source` has of a chain and this engine has not. Never raises `PageRayError`:
        a failed pull is an outcome, and its blocks will be recomputed."""
        started_s = time.monotonic()
        transfer_id = TransferId(next(self._ids))
        begun = self._pages.begin_import(transfer_id, contents)
        if begun is None:
            return PullOutcome()
        failure: str | None = None
        end = PushEnd()
        try:
            groups = layer_groups(
                self._info.layout.num_layers, COMPUTE_LAYER_GROUPS if compute is not None else 1
            )
            expectation = self._arrivals.expect(transfer_id, begun.block_ids, groups)
            request = PushRequest(
                transfer_id=transfer_id,
                source=source.engine_id,
                source_epoch=source.epoch,
                destination=self._info,
                transport=transport,
                contents=tuple(contents),
                first=begun.num_local,
                destination_blocks=tuple(begun.block_ids),
                pool_paths=self._shared_paths(transport),
                compute=compute,
                num_layer_groups=len(groups),
            )
            end = self._receive(source, request, expectation, timeout_s, cancel)
        except (grpc.RpcError, TransferError, UnexpectedWriteError) as error:
            failure = _reason(error)
        except BaseException:
            failure = "an unexpected error"
            raise
        finally:
            self._arrivals.close(transfer_id)
            if failure is None:
                self._pages.finish_import(transfer_id, end.num_blocks)
            else:
                self._pages.abort_import(transfer_id)
                self._settler.settle_later(transfer_id, source, transport)
        if failure is not None:
            logger.warning(
                "pull %d of %d blocks from %s failed: %s",
                transfer_id,
                len(begun.block_ids),
                source.engine_id,
                failure,
            )
        return PullOutcome(
            num_blocks=end.num_blocks,
            num_computed_blocks=end.num_computed_blocks,
            num_bytes=end.num_blocks * self._block_bytes,
            seconds=time.monotonic() - started_s,
            failure=failure,
        )

    def _receive(
        self,
        source: EngineInfo,
        request: PushRequest,
        expectation: Expectation,
        timeout_s: float,
        cancel: PullCancel,
    ) -> PushEnd:
        """Follow the push to its end; the blocks it names are here then, verified."""
        stream = self._peers.push(source, encode(request), timeout_s)
        cancel.watch(stream.cancel)
        for data in stream:
            message = decode_push_message(data)
            if isinstance(message, PushEnd):
                if message.failure is not None:
                    raise TransferError(message.failure)
                _check_count(expectation, message.num_blocks * request.num_layer_groups)
                return message
            if request.transport == "shared_memory":
                self._confirm(request, message)
        raise TransferError("The push ended without a word.")

    def _confirm(self, request: PushRequest, part: PushedPart) -> None:
        if not self._arrivals.confirm(request.transfer_id, part.indices, part.checksums):
            raise TransferError("The bytes that came are not those that were sent.")

    def _shared_paths(self, transport: TransportName) -> tuple[str, ...]:
        if transport != "shared_memory":
            return ()
        return tuple(path for path in self._pages.paths if path is not None)

    @property
    def _block_bytes(self) -> int:
        layout = self._info.layout
        return sum(layout.page_bytes(rank) for rank in range(len(layout.shards)))


def _check_count(expectation: Expectation, num_announced: int) -> None:
    if expectation.failure is not None:
        raise TransferError(expectation.failure)
    if expectation.num_counted != num_announced:
        raise TransferError(
            f"{expectation.num_counted} writes arrived of {num_announced} announced."
        )


def _reason(error: Exception) -> str:
    if isinstance(error, grpc.Call):
        return f"{error.code().name}: {error.details()}"
    return str(error)
