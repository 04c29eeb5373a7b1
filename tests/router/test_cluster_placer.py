"""Placing requests by what the coordinator says, and without it."""

import asyncio
from collections.abc import Callable

import pytest

from pageray.cluster.block_keys import BlockContent, BlockHasher
from pageray.cluster.coordinator.errors import CoordinatorUnavailableError
from pageray.cluster.coordinator.messages import EngineView, Location
from pageray.cluster.generation import GenerateRequest
from pageray.cluster.ids import BlockKey, EngineId, RequestId
from pageray.cluster.sampling_params import SamplingParams
from pageray.router.cluster_placer import LOOKUP_TIMEOUT_S, ClusterPlacer
from pageray.router.replica_board import ReplicaBoard
from pageray.router.wire import ModelFacts
from placement_views import BLOCK_SIZE, FACTS, ROOT, view_of

PROMPT = tuple(range(10 * BLOCK_SIZE + 1))


class Lookup:
    """Answers with fixed engines; `held` says how much of which prompt each holds."""

    def __init__(self, *views: EngineView) -> None:
        self.views = views
        self.held: dict[str, int] = {}
        self.asked: list[tuple[BlockKey, ...]] = []
        self.answer: Callable[[], None] = lambda: None
        self.delay_s = 0.0

    async def locate(self, root_key: BlockKey, keys: tuple[BlockKey, ...]) -> Location:
        self.asked.append(keys)
        await asyncio.sleep(self.delay_s)
        self.answer()
        return Location(
            engines=tuple(
                EngineView(
                    info=view.info,
                    load=view.load,
                    num_matched_blocks=min(len(keys), self.held.get(view.info.engine_id, 0)),
                )
                for view in self.views
            )
        )


async def facts() -> ModelFacts:
    return FACTS


def request_of(prompt: tuple[int, ...] = PROMPT, session: str = "") -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId("r"),
        prompt_token_ids=prompt,
        sampling=SamplingParams(),
        session_id=session,
    )


def test_the_engine_asks_about_the_same_keys_as_the_router() -> None:
    """One tokenisation and one chain: what the router predicts is what the engine looks up."""
    lookup = Lookup(view_of("a"))
    chain: list[BlockContent] = []
    BlockHasher(ROOT, BLOCK_SIZE).extend(chain, PROMPT[:-1], "")
    asyncio.run(ClusterPlacer(lookup, facts, ReplicaBoard()).place(request_of()))
    assert lookup.asked == [tuple(content.key for content in chain)]


def test_the_pages_win_while_their_engine_is_free() -> None:
    lookup = Lookup(view_of("a"), view_of("b"))
    lookup.held = {"b": 10}

    async def scenario() -> None:
        placer = ClusterPlacer(lookup, facts, ReplicaBoard())
        assert (await placer.place(request_of())).ranking[0] == "b"

    asyncio.run(scenario())


def test_a_busy_holder_gives_its_pages_to_another_engine() -> None:
    lookup = Lookup(view_of("a"), view_of("b", num_queued_tokens=50_000))
    lookup.held = {"b": 10}

    async def scenario() -> None:
        assignment = await ClusterPlacer(lookup, facts, ReplicaBoard()).place(request_of())
        assert assignment.ranking[0] == "a"
        assert assignment.pull_from is not None
        assert assignment.pull_from.engine_id == "b"

    asyncio.run(scenario())


def test_siblings_that_come_before_any_event_stay_together() -> None:
    lookup = Lookup(view_of("a"), view_of("b"), view_of("c"))

    async def scenario() -> set[EngineId]:
        placer = ClusterPlacer(lookup, facts, ReplicaBoard())
        chosen: set[EngineId] = set()
        for _ in range(4):
            assignment = await placer.place(request_of())
            chosen.add(assignment.ranking[0])
            assignment.first_token()
        return chosen

    assert len(asyncio.run(scenario())) == 1


def test_requests_without_a_common_prefix_spread() -> None:
    lookup = Lookup(view_of("a"), view_of("b"))

    async def scenario() -> list[EngineId]:
        placer = ClusterPlacer(lookup, facts, ReplicaBoard())
        placed = [
            await placer.place(request_of(tuple(range(k, k + len(PROMPT))))) for k in range(1, 9)
        ]
        return [assignment.ranking[0] for assignment in placed]

    chosen = asyncio.run(scenario())
    assert abs(chosen.count(EngineId("a")) - chosen.count(EngineId("b"))) <= 2


def test_a_session_stays_where_it_was() -> None:
    lookup = Lookup(view_of("a"), view_of("b"))

    async def scenario() -> None:
        placer = ClusterPlacer(lookup, facts, ReplicaBoard())
        for name in ("b", "a"):
            first = await placer.place(request_of(session=name))
            first.accepted_by(EngineId(name))
            first.close()
        for number in range(4):
            for name in ("a", "b"):
                prompt = tuple(range(100 + number, 100 + number + 40))
                placed = await placer.place(request_of(prompt, session=name))
                assert placed.ranking[0] == name
                placed.close()

    asyncio.run(scenario())


def test_replicas_that_serve_does_not_route_to_are_not_chosen() -> None:
    lookup = Lookup(view_of("a"), view_of("b"))
    lookup.held = {"a": 10}
    board = ReplicaBoard()
    board.update([EngineId("b")])

    async def scenario() -> None:
        assert (await ClusterPlacer(lookup, facts, board).place(request_of())).ranking == ("b",)

    asyncio.run(scenario())


@pytest.mark.parametrize("fault", ["raises", "is slow"])
def test_without_an_answer_requests_go_by_load_and_do_not_wait(fault: str) -> None:
    lookup = Lookup(view_of("a"))

    def unavailable() -> None:
        raise CoordinatorUnavailableError("it is down in this test.")

    if fault == "raises":
        lookup.answer = unavailable
    else:
        lookup.delay_s = 60.0

    async def scenario() -> None:
        placer = ClusterPlacer(lookup, facts, ReplicaBoard())
        async with asyncio.timeout(LOOKUP_TIMEOUT_S + 2.0):
            for _ in range(3):
                assert (await placer.place(request_of())).ranking == ()
        assert len(lookup.asked) == 1, "a coordinator that is away is not asked by every request"

    asyncio.run(scenario())


def test_an_empty_cluster_and_a_short_prompt_are_no_fault() -> None:
    async def scenario() -> None:
        placer = ClusterPlacer(Lookup(), facts, ReplicaBoard())
        assert (await placer.place(request_of((5,)))).ranking == ()

    asyncio.run(scenario())
