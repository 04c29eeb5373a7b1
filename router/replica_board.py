"""Which replicas of a deployment Serve routes to now, and who wants to know when one has gone.

Serve tells only its request router, an object that it makes itself, in every process with a
handle. That router writes here, and the streams of the same process listen.
"""

import asyncio
import threading
from collections.abc import Callable, Iterable
from typing import NewType

from pageray.cluster.ids import EngineId

SubscriptionId = NewType("SubscriptionId", int)


class ReplicaBoard:
    """Thread-safe. An engine's id is its replica's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: frozenset[EngineId] = frozenset()
        self._is_known = False
        self._listeners: dict[SubscriptionId, Callable[[], None]] = {}
        self._next_id = 1

    @property
    def live(self) -> frozenset[EngineId]:
        """Empty before the router has said anything."""
        return self._live

    def should_leave(self, engine_id: EngineId) -> bool:
        """Whether a stream is better off elsewhere: its replica is going, and there is another."""
        return self._is_known and engine_id not in self._live and bool(self._live)

    def update(self, live: Iterable[EngineId]) -> None:
        """Called by the request router, in its thread."""
        with self._lock:
            self._live = frozenset(live)
            self._is_known = True
            listeners = list(self._listeners.values())
        for listener in listeners:
            listener()

    def subscribe(self, on_change: Callable[[], None]) -> SubscriptionId:
        """`on_change` is run on the caller's event loop after every update, until `unsubscribe`."""
        loop = asyncio.get_running_loop()

        def wake() -> None:
            try:
                loop.call_soon_threadsafe(on_change)
            except RuntimeError:
                # The loop is closed: nobody is left to be told.
                return

        with self._lock:
            subscription_id = SubscriptionId(self._next_id)
            self._next_id += 1
            self._listeners[subscription_id] = wake
        return subscription_id

    def unsubscribe(self, subscription_id: SubscriptionId) -> None:
        with self._lock:
            self._listeners.pop(subscription_id, None)


_boards: dict[tuple[str, str], ReplicaBoard] = {}
_boards_lock = threading.Lock()


def board_of(app_name: str, deployment_name: str) -> ReplicaBoard:
    """The board of this process for one deployment: the only way to the router that Serve made."""
    with _boards_lock:
        return _boards.setdefault((app_name, deployment_name), ReplicaBoard())
