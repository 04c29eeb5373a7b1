"""What two engines say to each other about pages: MessagePack over gRPC, both ways.

The destination asks for a push and gets a stream: `PushBegin`, a `PushedPart` per batch of
writes, `PushEnd`. If it gives up, it asks to cancel until it hears that nothing is in flight.
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
    """Compute the chain as the prompt of this request, and push blocks as they are done."""


class PushBegin(msgspec.Struct, frozen=True, tag="begin"):
    """The holder has pinned this many blocks from `first` on; 0: it has none of them.

    With `compute` it is the number of blocks that will be there when all goes well.
    """

    num_blocks: int


class PushedPart(msgspec.Struct, frozen=True, tag="part"):
    """Writes `start .. start + num_writes` are done. Without a receiver at the destination these
    are the checksums to verify them with; otherwise empty."""

    start: int
    num_writes: int
    checksums: tuple[int, ...] = ()


class PushEnd(msgspec.Struct, frozen=True, tag="end"):
    """Nothing of the transfer is in flight any more. `failure` says why it is not complete."""

    failure: str | None = None


PushMessage = PushBegin | PushedPart | PushEnd


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
