"""The part of NIXL (optional: `nixl-cu12`) that PageRay uses, with types, loaded when needed."""

import importlib
from collections.abc import Callable, Sequence
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from pageray.cluster.errors import ConfigError

Regions = list[tuple[int, int, int, str]]
"""(address, bytes, device, ""), to register."""
Runs = NDArray[np.uint64]
"""`[N, 5]`: address, bytes of a descriptor, device, stride, number of descriptors."""


class Releasable(Protocol):
    def release(self) -> None: ...


class Agent(Protocol):
    """What `nixl_agent` offers; its methods raise the exceptions of `NixlApi.errors`."""

    def register_memory(self, reg_list: Regions, mem_type: str) -> object: ...
    def deregister_memory(self, dereg_list: object) -> None: ...
    def get_agent_metadata(self) -> bytes: ...
    def add_remote_agent(self, metadata: bytes) -> str | bytes: ...
    def remove_remote_agent(self, agent: str) -> None: ...
    def prep_xfer_dlist(self, agent_name: str, xfer_list: Runs, mem_type: str) -> Releasable: ...
    def make_prepped_xfer(
        self,
        operation: str,
        local_xfer_side: Releasable,
        local_indices: Sequence[int],
        remote_xfer_side: Releasable,
        remote_indices: Sequence[int],
    ) -> Releasable: ...
    def transfer(self, handle: Releasable) -> str: ...
    def check_xfer_state(self, handle: Releasable) -> str: ...


class NixlApi:
    """Raises `ConfigError` when the package is not installed."""

    def __init__(self) -> None:
        try:
            api = importlib.import_module("nixl_cu12._api")
            bindings = importlib.import_module("nixl_cu12._bindings")
        except ImportError as error:
            raise ConfigError(
                "The NIXL transport needs the package nixl-cu12: pip install 'pageray[nixl]' "
                f"({error})."
            ) from error
        self._names = vars(api)
        # They have no base class of their own.
        self.errors = tuple(
            value
            for value in vars(bindings).values()
            if isinstance(value, type) and issubclass(value, Exception)
        )

    def open_agent(self, name: str) -> Agent:
        """An agent of a name that no other agent it will meet has. Thread-safe."""
        sync_modes = self._names["nixl_thread_sync_t"]
        config = cast("Callable[..., object]", self._names["nixl_agent_config"])(
            sync_mode=sync_modes.NIXL_THREAD_SYNC_STRICT
        )
        return cast("Callable[..., Agent]", self._names["nixl_agent"])(name, config)
