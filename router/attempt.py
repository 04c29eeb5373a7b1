"""One engine's work on a request, as a stream of outputs that can be left in mid-stream."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from types import TracebackType

from pageray.cluster.coordinator.messages import EngineInfo
from pageray.cluster.errors import CapacityError
from pageray.cluster.generation import RequestOutput
from pageray.cluster.ids import EngineId
from pageray.router.replica_board import ReplicaBoard
from pageray.router.wire import AcceptedFrame, decode_frame

ACCEPT_TIMEOUT_S = 60.0
"""A request that no engine has taken for so long is refused: all may be dead, or starting."""
_RETRY_AFTER_S = 10.0

_closing: set[asyncio.Task[None]] = set()
"""Streams that were left are closed in the background; a task nobody refers to may vanish."""


class Attempt:
    """Used as an async context manager: leaving it ends the engine's work.

    `outputs` ends early, with `has_left` set, when the engine's replica is being taken away while
    there is another one to go on with, or after `leave_for`.
    """

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        board: ReplicaBoard,
        accept_timeout_s: float = ACCEPT_TIMEOUT_S,
        *,
        may_leave: bool = True,
    ) -> None:
        """Without `may_leave` it stays to the end, whatever the board says."""
        self._frames = frames
        self._board = board
        self._accept_timeout_s = accept_timeout_s
        self._may_leave = may_leave
        self._arrived: asyncio.Queue[AcceptedFrame | RequestOutput | None] = asyncio.Queue()
        self.engine_id: EngineId | None = None
        """Who does the work; None until it has been accepted."""
        self.engine_info: EngineInfo | None = None
        self.has_left = False
        self.has_output = False
        self.target: EngineId | None = None
        """Where to go on, if it was told to leave for a certain engine."""

    async def __aenter__(self) -> "Attempt":
        self._subscription = self._board.subscribe(self._wake)
        self._pump = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._board.unsubscribe(self._subscription)
        self._pump.cancel()
        if self.has_left:
            # The next engine is not to wait for this one's goodbye.
            _closing.add(self._pump)
            self._pump.add_done_callback(_closing.discard)
        else:
            await asyncio.gather(self._pump, return_exceptions=True)

    def leave_for(self, target: EngineId) -> None:
        """End `outputs` early: another engine is to go on."""
        self.target = target
        self._wake()

    async def outputs(self) -> AsyncIterator[RequestOutput]:
        """Iterate once. Raises what the engine raised, and `CapacityError` when none took it."""
        await self._accept()
        while not self._should_leave():
            item = await self._arrived.get()
            if isinstance(item, RequestOutput):
                self.has_output = True
                yield item
            elif item is None and self._pump.done():
                await self._pump
                return
        self.has_left = True

    async def _accept(self) -> None:
        try:
            async with asyncio.timeout(self._accept_timeout_s):
                while self.engine_id is None:
                    item = await self._arrived.get()
                    if isinstance(item, AcceptedFrame):
                        self.engine_id, self.engine_info = item.engine_id, item.info
                    elif item is None and self._pump.done():
                        await self._pump
                        raise CapacityError("The engine ended the stream at once.", _RETRY_AFTER_S)
        except TimeoutError:
            raise CapacityError(
                f"No engine of this model has taken the request in {self._accept_timeout_s:.0f} s. "
                "All may be starting or overloaded.",
                _RETRY_AFTER_S,
            ) from None

    def _should_leave(self) -> bool:
        if self.target is not None:
            return True
        if self.engine_id is None or not self._may_leave:
            return False
        return self._board.should_leave(self.engine_id)

    def _wake(self) -> None:
        self._arrived.put_nowait(None)

    async def _run(self) -> None:
        try:
            async with aclosing(self._frames):
                async for data in self._frames:
                    self._arrived.put_nowait(decode_frame(data))
        finally:
            # The task is done only after this line, so the reader is woken then.
            asyncio.get_running_loop().call_soon(self._wake)
