"""What two engines say to each other about pages: MessagePack over gRPC, both ways.

The destination asks for a push and gets a stream: a `PushedPart` per batch of writes, then
`PushEnd`. If it gives up, it asks to cancel until it hears that nothing is in flight.
"""

from typing import Literal

import msgspec

from pageray.cluster.block_keys import BlockContent
from pageray.cluster.coordinator.messages import EngineInfo
from pageray.cluster.generation import GenerateRequest
from pageray.cluster.ids import BlockId, EngineId, Epoch, TransferId

TransportName = Literal["shared_memory", "sockets", "grpc"]


class PushRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Write blocks `first ..` of the chain `contents` into `destination_blocks`, in order."""

    transfer_id: TransferId
    source: EngineId
    source_epoch: Epoch
    destination: EngineInfo
    transport: TransportName
    contents: tuple[BlockContent, ...]
    """The chain from its root: the holder compares tokens, not only digests."""
    first: int
    destination_blocks: tuple[BlockId, ...]
    pool_paths: tuple[str, ...] = ()
    """By rank, for shared memory."""
    compute: GenerateRequest | None = None
    """Compute the chain as this request's tokens, and push blocks as they are done."""
    num_layer_groups: int = 1
    """Each block comes in so many writes, a group of layers each; see `layer_groups`."""


class PushedPart(msgspec.Struct, frozen=True, tag="part"):
    """These writes are done. Without a receiver at the destination `checksums` are to verify them
    with, by position; otherwise empty."""

    indices: tuple[int, ...]
    checksums: tuple[int, ...] = ()


class PushEnd(msgspec.Struct, frozen=True, tag="end"):
    """Nothing of the transfer is in flight any more; `num_blocks` blocks from `first` on are
    written whole. `failure` says why they are of no use."""

    num_blocks: int = 0
    failure: str | None = None
    num_computed_blocks: int = 0
    """Those of them that the holder had to compute first."""


PushMessage = PushedPart | PushEnd


class CancelRequest(msgspec.Struct, frozen=True, kw_only=True):
    transfer_id: TransferId
    source_epoch: Epoch
    destination: EngineId
    destination_epoch: Epoch


class CancelReply(msgspec.Struct, frozen=True):
    is_stopped: bool
    """Nothing of the transfer is in flight and nothing will be. False: ask again."""


encode = msgspec.msgpack.encode
decode_push_request = msgspec.msgpack.Decoder(PushRequest).decode
decode_push_message = msgspec.msgpack.Decoder[PushMessage](PushMessage).decode
decode_cancel_request = msgspec.msgpack.Decoder(CancelRequest).decode
decode_cancel_reply = msgspec.msgpack.Decoder(CancelReply).decode
