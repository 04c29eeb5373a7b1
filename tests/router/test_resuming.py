"""Streams over engines that die, stumble or are taken away: every token once, in order."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

import pytest

from pageray.cluster.errors import (
    CapacityError,
    EngineDeadError,
    InvalidParameterError,
    PageRayError,
    ServerError,
)
from pageray.cluster.generation import FinishReason, GenerateRequest, RequestOutput, SequenceOutput
from pageray.cluster.ids import EngineId, RequestId
from pageray.cluster.rebalance import Move
from pageray.cluster.sampling_params import SamplingParams
from pageray.router.anywhere_placer import AnywherePlacer
from pageray.router.attempt import Attempt
from pageray.router.replica_board import ReplicaBoard
from pageray.router.resumable_request import ResumableRequest
from pageray.router.resuming import MAX_MOVES, Resuming
from pageray.router.wire import decode_request, encode_accepted, encode_error, encode_output

NUM_TOKENS = 12


def token_of(request: GenerateRequest, index: int, position: int) -> int:
    assert request.sampling.seed is not None
    return (request.sampling.seed + 31 * index + 7 * position) % 1000


@dataclass
class Replicas:
    """Engines that answer as any other would; `before` may raise or wait ahead of each token."""

    n: int = 1
    before: Callable[[int, int], None] = lambda attempt, position: None
    repeats: int = 0
    """Tokens that each later attempt delivers again."""
    requests: list[GenerateRequest] = field(default_factory=list[GenerateRequest])
    rankings: list[tuple[EngineId, ...]] = field(default_factory=list[tuple[EngineId, ...]])

    async def frames(
        self, data: bytes, ranking: tuple[EngineId, ...]
    ) -> AsyncGenerator[bytes, None]:
        request = decode_request(data)
        self.requests.append(request)
        self.rankings.append(ranking)
        attempt = len(self.requests)
        yield encode_accepted(EngineId(f"e{attempt}"), None)
        try:
            start = max(0, request.num_resumed_tokens - self.repeats)
            for position in range(start, NUM_TOKENS):
                self.before(attempt, position)
                await asyncio.sleep(0)
                yield encode_output(self._output(request, position))
        except PageRayError as error:
            yield encode_error(error)

    def _output(self, request: GenerateRequest, position: int) -> RequestOutput:
        is_last = position == NUM_TOKENS - 1
        sequences = tuple(
            SequenceOutput(
                index=index,
                token_ids=(token_of(request, index, position),),
                position=position,
                finish_reason=FinishReason.LENGTH if is_last else None,
            )
            for index in range(self.n)
            if not (request.resumed and request.resumed[index].is_finished)
        )
        return RequestOutput(
            request_id=request.request_id,
            sequences=sequences,
            num_prompt_tokens=len(request.prompt_token_ids),
            is_finished=is_last,
        )


def request_of(n: int = 1, seed: int | None = None) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId("r"),
        prompt_token_ids=(1, 2, 3),
        sampling=SamplingParams(n=n, max_tokens=NUM_TOKENS, seed=seed),
    )


async def collect(
    run: ResumableRequest,
    replicas: Replicas,
    board: ReplicaBoard | None = None,
    patience_s: float = 10.0,
) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    is_finished = False
    resuming = Resuming(
        replicas.frames, AnywherePlacer(), board or ReplicaBoard(), patience_s=patience_s
    )
    async for output in resuming.outputs(run):
        assert not is_finished
        assert output.request_id == "r"
        for sequence in output.sequences:
            assert sequence.position == len(tokens.setdefault(sequence.index, []))
            tokens[sequence.index] += sequence.token_ids
        is_finished = output.is_finished
    assert is_finished
    return tokens


def dies_at(*places: tuple[int, int]) -> Callable[[int, int], None]:
    def before(attempt: int, position: int) -> None:
        if (attempt, position) in places:
            raise EngineDeadError("Rank 0 is gone.")

    return before


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("repeats", [0, 3])
def test_a_dead_engine_costs_no_token(n: int, repeats: int) -> None:
    calm = asyncio.run(collect(ResumableRequest(request_of(n)), Replicas(n=n)))
    replicas = Replicas(n=n, before=dies_at((1, 0), (2, 5), (3, 6)), repeats=repeats)
    assert asyncio.run(collect(ResumableRequest(request_of(n)), replicas)) == calm
    assert [request.num_resumed_tokens for request in replicas.requests] == [0, 0, 5, 6]
    ids = [request.request_id for request in replicas.requests]
    assert len(set(ids)) == 4, "an engine may still be letting go of an earlier attempt"
    assert len({request.sampling.seed for request in replicas.requests}) == 1


def test_the_clients_own_seed_is_kept() -> None:
    replicas = Replicas(before=dies_at((1, 4)))
    asyncio.run(collect(ResumableRequest(request_of(seed=99)), replicas))
    assert [request.sampling.seed for request in replicas.requests] == [99, 99]


def test_a_hole_is_an_error_and_not_a_gap_in_the_text() -> None:
    replicas = Replicas(repeats=-2)
    with pytest.raises(ServerError, match="continues at token 2, but only 0 have come"):
        asyncio.run(collect(ResumableRequest(request_of()), replicas))


def test_a_sequence_that_the_client_ended_is_not_revived() -> None:
    run = ResumableRequest(request_of(n=2))

    def before(attempt: int, position: int) -> None:
        if (attempt, position) == (1, 5):
            run.finish(0)
            raise EngineDeadError("Rank 0 is gone.")

    replicas = Replicas(n=2, before=before)
    tokens = asyncio.run(collect(run, replicas))
    assert len(tokens[1]) == NUM_TOKENS
    assert len(tokens[0]) <= 5, "what came after the end is not delivered"
    assert replicas.requests[1].resumed[0].is_finished


def test_a_client_error_is_not_tried_again() -> None:
    def before(attempt: int, position: int) -> None:
        raise InvalidParameterError("top_p is 7.", param="top_p")

    replicas = Replicas(before=before)
    with pytest.raises(InvalidParameterError):
        asyncio.run(collect(ResumableRequest(request_of()), replicas))
    assert len(replicas.requests) == 1


def test_when_every_engine_fails_the_client_is_told() -> None:
    def before(attempt: int, position: int) -> None:
        raise EngineDeadError("Rank 0 is gone.")

    replicas = Replicas(before=before)
    with pytest.raises(CapacityError, match="Rank 0 is gone") as caught:
        asyncio.run(collect(ResumableRequest(request_of()), replicas, patience_s=0.3))
    assert caught.value.retry_after_s > 0
    assert len(replicas.requests) >= 3


def test_an_engine_that_has_just_failed_is_tried_last() -> None:
    board = ReplicaBoard()
    board.update([EngineId("e1"), EngineId("e2")])
    replicas = Replicas(before=dies_at((1, 4)))
    asyncio.run(collect(ResumableRequest(request_of()), replicas, board))
    assert replicas.rankings == [(), (EngineId("e2"),)]


def test_a_stream_leaves_a_replica_that_is_taken_away() -> None:
    board = ReplicaBoard()

    def before(attempt: int, position: int) -> None:
        if (attempt, position) == (1, 4):
            board.update([EngineId("e2")])

    calm = asyncio.run(collect(ResumableRequest(request_of()), Replicas()))

    async def scenario() -> tuple[dict[int, list[int]], Replicas]:
        board.update([EngineId("e1"), EngineId("e2")])
        replicas = Replicas(before=before)
        return await collect(ResumableRequest(request_of()), replicas, board), replicas

    tokens, replicas = asyncio.run(scenario())
    assert tokens == calm
    assert len(replicas.requests) == 2
    assert 1 <= replicas.requests[1].num_resumed_tokens <= 5


def test_a_request_is_moved_to_the_engine_it_should_go_to() -> None:
    board = ReplicaBoard()
    calm = asyncio.run(collect(ResumableRequest(request_of()), Replicas()))

    async def scenario() -> tuple[dict[int, list[int]], Replicas]:
        board.update([EngineId("e1"), EngineId("e2")])
        resuming: list[Resuming] = []

        def before(attempt: int, position: int) -> None:
            if (attempt, position) == (1, 4):
                move = Move(EngineId("e1"), EngineId("e2"))
                assert resuming[0].move_one(move)
                assert not resuming[0].move_one(move), "it is on its way"
                assert not resuming[0].move_one(Move(EngineId("e2"), EngineId("e1")))

        replicas = Replicas(before=before)
        resuming.append(Resuming(replicas.frames, AnywherePlacer(), board))
        tokens: dict[int, list[int]] = {0: []}
        async for output in resuming[0].outputs(ResumableRequest(request_of())):
            tokens[0] += output.sequences[0].token_ids
        return tokens, replicas

    tokens, replicas = asyncio.run(scenario())
    assert tokens == calm
    assert replicas.rankings == [(), (EngineId("e2"),)]


def test_a_board_that_is_wrong_makes_no_request_wander() -> None:
    """Serve goes on routing to a replica that the board does not list."""
    board = ReplicaBoard()

    async def scenario() -> Replicas:
        board.update([EngineId("somebody else")])
        replicas = Replicas()
        await collect(ResumableRequest(request_of()), replicas, board)
        return replicas

    assert len(asyncio.run(scenario()).requests) == MAX_MOVES + 1


def test_a_stream_stays_when_there_is_nowhere_to_go() -> None:
    board = ReplicaBoard()

    def before(attempt: int, position: int) -> None:
        if position == 4:
            board.update([])

    async def scenario() -> Replicas:
        board.update([EngineId("e1")])
        replicas = Replicas(before=before)
        await collect(ResumableRequest(request_of()), replicas, board)
        return replicas

    assert len(asyncio.run(scenario()).requests) == 1


def test_nobody_takes_the_request() -> None:
    async def silence() -> AsyncGenerator[bytes, None]:
        await asyncio.Event().wait()
        yield b""

    async def scenario() -> None:
        async with Attempt(silence(), ReplicaBoard(), accept_timeout_s=0.01) as attempt:
            async for _ in attempt.outputs():
                pass

    with pytest.raises(CapacityError, match="No engine of this model has taken the request"):
        asyncio.run(scenario())
