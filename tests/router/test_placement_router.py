# pyright: basic
# Serve's request routers are typed by its private modules.
"""The request router's order, and that Serve pauses before it asks again."""

import asyncio
from types import SimpleNamespace

from pageray.router.placement_router import PlacementRouter


def choose(ranking: object) -> tuple[list[list[str]], bool]:
    router = PlacementRouter.__new__(PlacementRouter)
    context = SimpleNamespace(should_backoff=False)
    pending = SimpleNamespace(kwargs={"ranking": ranking}, routing_context=context)
    replicas = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in "abc"]
    groups = asyncio.run(router.choose_replicas(replicas, pending))  # pyright: ignore[reportArgumentType]
    names = [[replica.replica_id.unique_id for replica in group] for group in groups]
    return names, context.should_backoff


def test_the_ranking_comes_first_and_everybody_comes() -> None:
    groups, pauses = choose(("c", "gone", "a"))
    assert groups == [["c"], ["a"], ["b"]]
    assert pauses, "without it Serve asks again at once, for ever, while no replica answers"


def test_a_ranking_that_is_none_is_no_ranking() -> None:
    for ranking in ((), None, "abc"):
        groups, pauses = choose(ranking)
        assert sorted(name for group in groups for name in group) == ["a", "b", "c"]
        assert len(groups[0]) == 2
        assert pauses
