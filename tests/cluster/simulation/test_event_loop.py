"""Simulated time and what waits in it."""

import pytest

from pageray.cluster.simulation.event_loop import EventLoop, Future, Scope
from pageray.cluster.simulation.shared_line import SharedLine


def test_things_happen_in_order_of_time_then_of_asking() -> None:
    loop, seen = EventLoop(), list[tuple[str, float]]()
    for name, time_s in (("b", 2.0), ("a", 1.0), ("c", 2.0), ("late", 0.0)):
        loop.at(time_s, lambda name=name: seen.append((name, loop.now_s)))
    loop.run_until(lambda: len(seen) == 4)
    assert seen == [("late", 0.0), ("a", 1.0), ("b", 2.0), ("c", 2.0)]


def test_a_coroutine_sleeps_and_gets_results_and_errors() -> None:
    loop, seen = EventLoop(), list[object]()
    number: Future[int] = Future()
    broken: Future[int] = Future()

    async def work() -> None:
        await loop.sleep(3.0)
        seen.append(loop.now_s)
        seen.append(await number)
        try:
            await broken
        except ValueError as error:
            seen.append(str(error))

    loop.spawn(work(), Scope())
    loop.at(5.0, lambda: number.set_result(7))
    loop.at(6.0, lambda: broken.set_exception(ValueError("no")))
    loop.run_until(lambda: len(seen) == 3)
    assert seen == [3.0, 7, "no"]
    number.set_result(8)
    assert seen == [3.0, 7, "no"]


def test_only_so_long() -> None:
    loop, seen = EventLoop(), list[str]()
    slow: Future[str] = Future()
    fast: Future[str] = Future()

    async def wait(future: Future[str]) -> None:
        try:
            seen.append(await loop.within(1.0, future))
        except TimeoutError:
            seen.append("too late")

    loop.spawn(wait(fast), Scope())
    loop.spawn(wait(slow), Scope())
    loop.at(0.5, lambda: fast.set_result("in time"))
    loop.at(1.5, lambda: slow.set_result("late"))
    loop.run_until(lambda: loop.now_s > 1.4)
    assert seen == ["in time", "too late"]


def test_a_closed_scope_goes_on_with_nothing() -> None:
    loop, scope, seen = EventLoop(), Scope(), list[str]()

    async def work(name: str) -> None:
        try:
            await loop.sleep(1.0)
            seen.append(f"{name} went on")
        finally:
            seen.append(f"{name} ended")

    loop.spawn(work("a"), scope)
    loop.spawn(work("b"), scope)
    scope.close()
    assert seen == ["a ended", "b ended"]
    loop.at(2.0, lambda: None)
    loop.run_until(lambda: loop.now_s >= 2.0)
    assert seen == ["a ended", "b ended"]


def test_when_nothing_is_left_to_happen_it_says_so() -> None:
    with pytest.raises(RuntimeError, match="nothing happens"):
        EventLoop().run_until(lambda: False)


def test_a_line_is_shared_equally() -> None:
    """100 bytes/s: 100 bytes alone for half a second, then two share, then one is stopped."""
    loop = EventLoop()
    line = SharedLine(loop, 100.0)
    ended: dict[str, float] = {}

    def send(name: str, num_bytes: int) -> int:
        number, done = line.send(num_bytes)
        done.on_done(lambda: ended.setdefault(name, loop.now_s))
        return number

    numbers: list[int] = []
    loop.at(0.0, lambda: numbers.append(send("a", 100)))
    loop.at(0.5, lambda: numbers.append(send("b", 200)))
    loop.at(0.5, lambda: numbers.append(send("c", 200)))
    loop.at(1.0, lambda: line.stop(numbers[2]))
    loop.at(99.0, lambda: None)
    loop.run_until(lambda: loop.now_s >= 99.0)
    # a: 50 bytes in 0.5 s, 16.7 in the next, the rest at half speed.
    assert ended == {"a": pytest.approx(1.0 + 2 / 3), "b": pytest.approx(3.1666667)}
