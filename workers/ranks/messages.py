"""What an engine and its ranks say to each other, as MessagePack over mailboxes.

Commands go from the engine to every rank, reports from each rank to the engine. A rank's life:
`RankReport` (loaded; this much fits) - `AllocatePool` - `PoolReady` - then `RunStep` / `StepDone`
until `Shutdown`. `RankFailure` can take the place of any report and is the rank's last word.
"""

import msgspec

from pageray.cluster.config import EngineConfig
from pageray.cluster.step import StepPlan, StepResult


class RankSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that a rank process needs to start."""

    config: EngineConfig
    model_folder: str
    rank: int
    size: int
    device_index: int
    """Which of the CUDA devices visible to the process."""
    num_threads: int
    rendezvous_path: str
    """A file through which the ranks of one engine find each other; in a folder of its own."""
    engine_pid: int
    commands_path: str
    reports_path: str
    progress_path: str


class RankReport(msgspec.Struct, frozen=True, kw_only=True, tag="report"):
    """A rank has its weights. Everything the engine must know of the model is in rank 0's."""

    max_blocks: int
    """Usable blocks that fit this rank's memory."""
    page_bytes: int
    num_layers: int
    head_dim: int
    kv_element_bytes: int
    kv_heads: tuple[int, int]
    """Of this rank, (start, end) as numbered in the whole model."""
    dtype: str
    kv_dtype: str
    model_fingerprint: str
    vocab_size: int
    max_position: int
    eos_token_ids: tuple[int, ...]


class PoolReady(msgspec.Struct, frozen=True, tag="ready"):
    """The pool is there and every kernel is compiled."""

    pool_path: str | None


class StepDone(msgspec.Struct, frozen=True, tag="done"):
    result: StepResult


class RankFailure(msgspec.Struct, frozen=True, tag="failure"):
    """The rank gives up. `kind` names the error class if it is one of ours."""

    kind: str
    message: str


class AllocatePool(msgspec.Struct, frozen=True, tag="allocate"):
    num_blocks: int


class RunStep(msgspec.Struct, frozen=True, tag="step"):
    plan: StepPlan


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    pass


Report = RankReport | PoolReady | StepDone | RankFailure
Command = AllocatePool | RunStep | Shutdown

encode = msgspec.msgpack.encode
decode_report = msgspec.msgpack.Decoder(Report).decode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_rank_spec = msgspec.msgpack.Decoder(RankSpec).decode
