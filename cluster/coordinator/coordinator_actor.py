# pyright: basic
# Remote handles are typed by Ray at run time only; this file is the boundary.
"""The one coordinator of an application as a named, detached Ray actor.

It outlives whoever started it. After a crash Ray starts it again with the same arguments: it knows
the same secret and no engine, and asks each that speaks to register. When no engine speaks any
more it ends itself.
"""

import asyncio
import os
import time
from typing import cast

import ray
from ray.actor import ActorHandle

NAMESPACE = "pageray"
EXPIRE_INTERVAL_S = 0.5


@ray.remote
class CoordinatorActor:
    """The process around `CoordinatorService`."""

    def __init__(self, secret: bytes, idle_timeout_s: float) -> None:
        # Ray pickles this class, and with it every global it names: a decoder cannot be.
        from pageray.cluster.coordinator.coordinator import Coordinator
        from pageray.cluster.coordinator.requests import CoordinatorService

        self._secret = secret
        self._idle_timeout_s = idle_timeout_s
        # Leases granted by the process before this one must not be taken for ours.
        coordinator = Coordinator(first_lease_id=time.time_ns())
        self._service = CoordinatorService(coordinator, time.monotonic())
        self._watch = asyncio.get_running_loop().create_task(self._expire_until_idle())

    async def secret(self) -> bytes:
        """Shared by all engines of the application; the same after a restart."""
        return self._secret

    async def process_id(self) -> int:
        """On its node; another one after a restart."""
        return os.getpid()

    async def handle(self, payload: bytes) -> bytes:
        """One request of `requests.py`, answered."""
        return self._service.handle(payload, time.monotonic())

    async def _expire_until_idle(self) -> None:
        me = ray.get_runtime_context().current_actor
        while True:
            await asyncio.sleep(EXPIRE_INTERVAL_S)
            self._service.expire(time.monotonic())
            if self._service.idle_s(time.monotonic()) > self._idle_timeout_s:
                # Not exit_actor: that works in a method only, and waits for calls under way.
                ray.kill(me, no_restart=True)


def coordinator_name(app_name: str) -> str:
    """The actor's name in namespace `NAMESPACE`."""
    return f"pageray-coordinator:{app_name}"


def find_or_start_coordinator(app_name: str, secret: bytes, idle_timeout_s: float) -> ActorHandle:
    """The application's coordinator. Whoever comes first starts it, and decides the arguments.

    Blocks for a call to Ray's control service, not until the actor is up. Raises `ValueError` or
    `RayError` when it is just ending.
    """
    return cast(
        "ActorHandle",
        CoordinatorActor.options(
            name=coordinator_name(app_name),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            num_cpus=0,
            # Anywhere: inside the starter's placement group it would end with the starter.
            scheduling_strategy="DEFAULT",
        ).remote(secret, idle_timeout_s),
    )
