"""What the router needs of an engine, so that tests can put a scripted one in its place."""

from collections.abc import AsyncGenerator, Callable
from typing import Protocol

from pageray.cluster.config import EngineConfig
from pageray.cluster.coordinator.messages import EngineInfo
from pageray.cluster.generation import GenerateRequest, RequestOutput
from pageray.cluster.ids import BlockKey, RequestId
from pageray.cluster.member_spec import MemberSpec
from pageray.cluster.pull_counters import PullCounters


class EngineStatsView(Protocol):
    """A snapshot of an engine's load."""

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def num_held_blocks(self) -> int:
        """Blocks that a sequence or a pin holds; the rest is free or cached."""
        ...

    @property
    def num_computed_tokens(self) -> int:
        """Since the start."""
        ...


class Engine(Protocol):
    """One engine, already started. All methods are called from one event loop."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_model_len(self) -> int:
        """Longest prompt + output, in tokens."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def capacity_tokens(self) -> int:
        """Token slots of the whole KV pool."""
        ...

    @property
    def block_size(self) -> int: ...
    @property
    def root_key(self) -> BlockKey:
        """What block keys are chained from (`block_keys.root_key`)."""
        ...

    async def join(self, spec: MemberSpec) -> EngineInfo:
        """Share pages with the application's other engines from now on.

        Raises `CoordinatorUnavailableError` or `ConfigError`; the engine goes on alone.
        """
        ...

    def generate(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request, ending with `is_finished`, as an async generator.

        Raises `ClientError`, `CapacityError` or `EngineDeadError` before the first item when the
        request is not admitted. Cancelling or closing the iterator aborts the request. At most
        one item per engine step; items coalesce while the consumer is busy.
        """
        ...

    def finish_sequence(self, request_id: RequestId, index: int) -> None:
        """End one sequence of a running request early; its siblings go on."""
        ...

    def check_health(self) -> None:
        """Raise `EngineDeadError` when the engine cannot make progress."""
        ...

    async def stats(self) -> EngineStatsView: ...

    @property
    def pull_counters(self) -> PullCounters:
        """All 0 for an engine that has joined no cluster."""
        ...

    def shutdown(self) -> None:
        """Leave the cluster, stop the ranks and free their memory. A second call does nothing."""
        ...


EngineFactory = Callable[[EngineConfig], Engine]
"""Starts an engine; blocks until it can serve."""


def start_async_engine(config: EngineConfig) -> Engine:
    """Start the real engine, with its ranks as Ray actors in this replica's placement group.

    The import costs a torch, hence not at the top.
    """
    from pageray.workers.async_engine import AsyncEngine
    from pageray.workers.ranks.rank_actor import RayLauncher

    return AsyncEngine.start(config, launcher=RayLauncher(config))
