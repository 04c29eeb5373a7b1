"""An engine's pools, registered with NIXL: others may write into them, and it from them."""

from collections.abc import Sequence

import msgspec
import numpy as np

from pageray.cluster.page_layout import PoolLayout
from pageray.workers.transfer.mapped_pages import ByteArray, MappedPages
from pageray.workers.transfer.nixl_api import Agent, NixlApi, Releasable

MEMORY = "DRAM"
_LOCAL = "NIXL_INIT_AGENT"


class NixlEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """What a source must know to write into an engine's pools. Whoever has it may."""

    metadata: bytes
    layout: PoolLayout
    num_blocks: int
    addresses: tuple[int, ...]
    """Of each rank's pool in the memory of the process that registered it."""


class NixlPools:
    """One NIXL agent for one engine."""

    def __init__(self, pages: MappedPages, name: str) -> None:
        """`name` must be unique among all engines, over their restarts too.

        Raises `ConfigError` when NIXL is not installed.
        """
        self.api = NixlApi()
        self.pages = pages
        self.agent: Agent = self.api.open_agent(name)
        ranks = [pages.rank(rank) for rank in range(len(pages.layout.shards))]
        self._registration = self.register(ranks)
        self.endpoint = NixlEndpoint(
            metadata=self.agent.get_agent_metadata(),
            layout=pages.layout,
            num_blocks=pages.num_blocks,
            addresses=tuple(rank.ctypes.data for rank in ranks),
        )

    def register(self, arrays: Sequence[ByteArray]) -> object | None:
        """Let NIXL read and write `arrays`; the result is for `deregister_memory`. None for none."""
        if not arrays:
            return None
        regions = [(array.ctypes.data, array.nbytes, 0, "") for array in arrays]
        return self.agent.register_memory(regions, MEMORY)

    def prepare(self, peer: str | None, address: int, run_bytes: int, count: int) -> Releasable:
        """A list of `count` descriptors of `run_bytes` each, one behind the other, in this
        process (`peer` None) or in the registered memory of a peer."""
        runs = np.array([[address, run_bytes, 0, run_bytes, count]], np.uint64)
        return self.agent.prep_xfer_dlist(_LOCAL if peer is None else peer, runs, MEMORY)

    def close(self) -> None:
        """Close the writers first. Afterwards the pools may be unmapped."""
        self.agent.deregister_memory(self._registration)
