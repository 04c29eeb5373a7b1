"""What engines, routers and the coordinator say to each other. Plain frozen data, MessagePack.

Block keys travel whole (32 bytes). An engine is named by its id *and* its epoch: whatever was
said under an older epoch is void.
"""

from typing import Literal

import msgspec

from pageray.cluster.ids import BlockKey, EngineId, Epoch
from pageray.cluster.page_layout import PoolLayout

Role = Literal["both", "prefill", "decode"]


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where an engine's page service can be reached."""

    control_address: str
    """host:port of its gRPC server."""
    data_address: str
    """host:port of its socket for page bytes."""
    host_id: str
    """Equal for two engines that can map each other's memory (same host, same boot)."""
    pid: int
    """On its host: once this process has ended it writes into nobody's pages any more."""


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An engine introduces itself; all of it is fixed for one epoch."""

    engine_id: EngineId
    epoch: Epoch
    root_key: BlockKey
    """Engines with equal root keys can share pages (`block_keys.root_key`)."""
    block_size: int
    num_blocks: int
    layout: PoolLayout
    role: Role = "both"
    endpoint: Endpoint | None = None
    """None: its pages cannot be pulled."""


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """How busy an engine is, with the rates it has measured of itself."""

    num_running: int = 0
    num_waiting: int = 0
    num_queued_tokens: int = 0
    """Tokens that wait to be computed: prompts not yet prefilled."""
    num_free_blocks: int = 0
    """Blocks nobody holds, cached ones included."""
    prefill_tokens_per_s: float = 0.0
    """0: not measured yet."""
    pull_bytes_per_s: float = 0.0
    """0: not measured yet."""


class BlocksStored(msgspec.Struct, frozen=True, array_like=True, tag="stored"):
    """These blocks may be hit from now on."""

    keys: tuple[BlockKey, ...]


class BlocksRemoved(msgspec.Struct, frozen=True, array_like=True, tag="removed"):
    keys: tuple[BlockKey, ...]


class CacheCleared(msgspec.Struct, frozen=True, array_like=True, tag="cleared"):
    """Every block of the engine is gone."""


BlockEvent = BlocksStored | BlocksRemoved | CacheCleared


class EventBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Events in the order in which they happened.

    Batches of one epoch are numbered 1, 2, 3, ...; a hole makes the coordinator ask for a snapshot.
    """

    engine_id: EngineId
    epoch: Epoch
    sequence_number: int
    events: tuple[BlockEvent, ...]


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All keys that the engine holds, as of batch `sequence_number` (included)."""

    engine_id: EngineId
    epoch: Epoch
    sequence_number: int
    keys: tuple[BlockKey, ...]


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    engine_id: EngineId
    epoch: Epoch
    load: EngineLoad
    sequence_number: int
    """Of the last batch sent, so that a lost last batch is noticed too."""


class EngineReply(msgspec.Struct, frozen=True, kw_only=True):
    """The coordinator's answer to anything an engine says."""

    must_register: bool = False
    """The coordinator does not know this engine in this epoch (it may have restarted)."""
    must_send_snapshot: bool = False
    """Its view of the engine's blocks has a hole."""
    is_stale: bool = False
    """A newer epoch of this engine is known: the speaker is a ghost and must be silent."""


class EngineView(msgspec.Struct, frozen=True, kw_only=True):
    """What a router sees of one engine."""

    info: EngineInfo
    load: EngineLoad
    num_matched_blocks: int = 0
    """Leading blocks of the prompt asked about that the engine holds."""


class Location(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a lookup: every live engine that may serve, in order of engine id."""

    engines: tuple[EngineView, ...]


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """The engine to pull a run of blocks from, and the lease that counts the pull against it."""

    lease_id: int
    info: EngineInfo
    num_matched_blocks: int
