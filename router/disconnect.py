"""Notices that a client has gone away."""

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request

T = TypeVar("T")


class ClientDisconnectedError(Exception):
    """The client hung up; there is nobody to answer."""


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled as soon as the client hangs up; then raises
    `ClientDisconnectedError`. The request's body must have been read."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_wait_for_disconnect(request))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnectedError
        return task.result()
    finally:
        await _cancelled(task)
        await _cancelled(watcher)


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _cancelled(task: asyncio.Task[Any]) -> None:
    """Cancel and wait, so that whatever the task holds is released before we go on."""
    waiting: Awaitable[object] = asyncio.gather(task, return_exceptions=True)
    task.cancel()
    await waiting
