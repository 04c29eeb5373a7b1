"""Several output streams as one, handed over in batches of whatever has accumulated."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from types import TracebackType

from pageray.cluster.generation import RequestOutput


class StreamMerger:
    """Reads all streams at once, so that a slow reader of `batches` gets more at a time rather
    than later. Used as an async context manager: leaving it closes every stream.

    At most one request's whole output is held per stream, which its max_tokens bounds.
    """

    def __init__(self, streams: Sequence[AsyncGenerator[RequestOutput, None]]) -> None:
        self._streams = streams
        self._arrived: list[tuple[int, RequestOutput]] = []
        self._wake = asyncio.Event()
        self._pumps: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "StreamMerger":
        self._pumps = [
            asyncio.create_task(self._pump(position, stream))
            for position, stream in enumerate(self._streams)
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    def stop(self, position: int) -> None:
        """Close one stream; what it has delivered stays."""
        self._pumps[position].cancel()

    async def batches(self) -> AsyncIterator[list[tuple[int, RequestOutput]]]:
        """(position of the stream, output) pairs in order of arrival; never an empty batch.

        Raises what a stream raised, after everything that had arrived before.
        """
        while True:
            batch, self._arrived = self._arrived, []
            if batch:
                yield batch
                continue
            self._raise_failure()
            if all(pump.done() for pump in self._pumps):
                return
            self._wake.clear()
            await self._wake.wait()

    async def _pump(self, position: int, stream: AsyncGenerator[RequestOutput, None]) -> None:
        try:
            async with aclosing(stream):
                async for output in stream:
                    self._arrived.append((position, output))
                    self._wake.set()
        finally:
            # The task is done only after this line, so the reader is woken once more then.
            asyncio.get_running_loop().call_soon(self._wake.set)

    def _raise_failure(self) -> None:
        for pump in self._pumps:
            if pump.done() and not pump.cancelled():
                error = pump.exception()
                if error is not None:
                    raise error
