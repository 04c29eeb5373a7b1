"""Simulated time: callbacks in order of their time, and coroutines that wait in it.

A coroutine waits with `await` on a `Future` or on `EventLoop.sleep`. What happens at one time
happens in the order in which it was asked for, so that a run depends on nothing but its inputs.
"""

import heapq
from collections.abc import Callable, Coroutine, Generator
from typing import Generic, TypeVar, cast

T = TypeVar("T")

Callback = Callable[[], object]


class Future(Generic[T]):
    """A value, or an exception, that is there later. Only the first of either counts."""

    __slots__ = ("_callbacks", "_error", "_value", "is_done")

    def __init__(self) -> None:
        self.is_done = False
        self._value: T | None = None
        self._error: Exception | None = None
        self._callbacks: list[Callback] = []

    def set_result(self, value: T) -> None:
        if not self.is_done:
            self._value = value
            self._end()

    def set_exception(self, error: Exception) -> None:
        if not self.is_done:
            self._error = error
            self._end()

    def on_done(self, callback: Callback) -> None:
        """Run `callback` when it is done, at once if it is."""
        if self.is_done:
            callback()
        else:
            self._callbacks.append(callback)

    def __await__(self) -> "Generator[Future[T], None, T]":
        if not self.is_done:
            yield self
        if self._error is not None:
            raise self._error
        return cast("T", self._value)

    def _end(self) -> None:
        self.is_done = True
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


class Scope:
    """What ends together, such as all that one engine does. A closed scope's coroutines are
    closed where they wait, and never go on."""

    def __init__(self) -> None:
        self.is_closed = False
        self.tasks: dict[_Task, None] = {}

    def close(self) -> None:
        self.is_closed = True
        for task in list(self.tasks):
            task.coroutine.close()
        self.tasks.clear()


class EventLoop:
    """`now_s` only grows."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callback]] = []
        self._num_asked = 0

    def at(self, time_s: float, callback: Callback) -> None:
        """Run `callback` then; a time in the past is now."""
        self._num_asked += 1
        heapq.heappush(self._heap, (max(time_s, self.now_s), self._num_asked, callback))

    def after(self, delay_s: float, callback: Callback) -> None:
        self.at(self.now_s + delay_s, callback)

    def sleep(self, delay_s: float) -> Future[None]:
        done: Future[None] = Future()
        self.at(self.now_s + delay_s, lambda: done.set_result(None))
        return done

    def spawn(self, coroutine: Coroutine[object, None, None], scope: Scope) -> None:
        """Run a coroutine until its first wait now, and on from there as its waits end."""
        task = _Task(coroutine, scope)
        scope.tasks[task] = None
        task.resume()

    async def within(self, timeout_s: float, awaited: Future[T]) -> T:
        """Raises TimeoutError when `awaited` is not done by then; it may still become so."""
        either: Future[None] = Future()
        awaited.on_done(lambda: either.set_result(None))
        self.after(timeout_s, lambda: either.set_result(None))
        await either
        if not awaited.is_done:
            raise TimeoutError(f"not done within {timeout_s} s")
        return await awaited

    def run_until(self, is_over: Callable[[], bool]) -> None:
        """Raises RuntimeError when nothing is left to happen before that."""
        heap = self._heap
        while not is_over():
            if not heap:
                raise RuntimeError(f"nothing happens any more after {self.now_s} s.")
            self.now_s, _, callback = heapq.heappop(heap)
            callback()


class _Task:
    __slots__ = ("coroutine", "scope")

    def __init__(self, coroutine: Coroutine[object, None, None], scope: Scope) -> None:
        self.coroutine = coroutine
        self.scope = scope

    def resume(self) -> None:
        if self.scope.is_closed:
            return
        try:
            awaited = cast("Future[object]", self.coroutine.send(None))
        except StopIteration:
            self.scope.tasks.pop(self, None)
            return
        awaited.on_done(self.resume)
