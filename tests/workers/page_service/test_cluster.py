"""Engines that share their prefixes through a coordinator, with real page services."""

import asyncio
import random

import msgspec
import pytest

from engine_process import greedy
from fake_engine import BLOCK_SIZE
from fake_ranks import EOS, continue_alone
from local_cluster import LocalCoordinator, Member, cluster_of, start_member, stop_member, until
from pageray.cluster.admission import request_seed
from pageray.cluster.coordinator.messages import Role
from pageray.cluster.generation import GenerateRequest, ResumedSequence
from pageray.cluster.ids import EngineId, RequestId

NUM_TOKENS = 5
NUM_BLOCKS = 12


def prompt_of(seed: int, num_blocks: int = NUM_BLOCKS, extra: int = 2) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(EOS) for _ in range(num_blocks * BLOCK_SIZE + extra)]


def request_of(prompt: list[int], name: str = "r") -> GenerateRequest:
    request = greedy(prompt, NUM_TOKENS)
    return GenerateRequest(
        request_id=RequestId(name),
        prompt_token_ids=request.prompt_token_ids,
        sampling=request.sampling,
    )


def expected(request: GenerateRequest) -> list[int]:
    """ignore_eos: as far as the sequence goes when it would end at one."""
    seed = request_seed(request, 0)
    return continue_alone(list(request.prompt_token_ids), seed, 0, NUM_TOKENS)


async def told(coordinator: LocalCoordinator, name: str, num_blocks: int = NUM_BLOCKS) -> None:
    """Wait until the coordinator knows that an engine holds so many blocks."""
    await until(lambda: len(held_by(coordinator, name)) >= num_blocks)


def held_by(coordinator: LocalCoordinator, name: str) -> set[int]:
    """Empty for an engine that the coordinator does not know."""
    known = {info.engine_id for info in coordinator.inner.engines}
    return coordinator.inner.blocks_held(EngineId(name)) if name in known else set()


def check_answer(tokens: list[int], request: GenerateRequest) -> None:
    wanted = expected(request)
    assert tokens[: len(wanted)] == wanted


def test_a_prefix_computed_by_one_engine_serves_another() -> None:
    async def scenario() -> None:
        coordinator = LocalCoordinator()
        async with cluster_of(coordinator, {"a": "both", "b": "both"}) as members:
            request = request_of(prompt_of(1))
            check_answer(await members["a"].generate(request), request)
            await told(coordinator, "a")
            check_answer(await members["b"].generate(request), request)
            assert members["b"].num_computed_tokens == 2 + NUM_TOKENS - 1
            counters = members["b"].prefetcher.counters
            assert counters.num_predicted_blocks == counters.num_delivered_blocks == NUM_BLOCKS
            assert members["a"].engine.stats().num_held_blocks == 0

    asyncio.run(scenario())


def test_another_tenants_pages_are_not_pulled() -> None:
    async def scenario() -> None:
        coordinator = LocalCoordinator()
        async with cluster_of(coordinator, {"a": "both", "b": "both"}) as members:
            request = request_of(prompt_of(20))
            await members["a"].generate(msgspec.structs.replace(request, cache_salt="one"))
            await told(coordinator, "a")
            for salt in ("two", ""):
                other = msgspec.structs.replace(request, cache_salt=salt)
                before = members["b"].num_computed_tokens
                check_answer(await members["b"].generate(other), other)
                computed = members["b"].num_computed_tokens - before
                assert computed == len(request.prompt_token_ids) + NUM_TOKENS - 1
            assert members["b"].prefetcher.counters.num_delivered_blocks == 0

    asyncio.run(scenario())


def test_colliding_keys_pull_no_wrong_page() -> None:
    """With digests of 4 bits the coordinator's hints are mostly wrong; the holder compares tokens,
    and the ranks every slot they read."""

    async def scenario() -> None:
        coordinator = LocalCoordinator()
        members = [
            start_member(coordinator, name, num_blocks=60, digest_bits=4) for name in ("a", "b")
        ]
        try:
            rng = random.Random(4)
            prompts = [prompt_of(seed, 6) for seed in range(6)]
            for number in range(60):
                request = request_of(rng.choice(prompts)[: rng.randrange(9, 27)], f"r{number}")
                check_answer(await rng.choice(members).generate(request), request)
                await asyncio.sleep(0.01)
            assert any(member.prefetcher.counters.num_pulls for member in members)
        finally:
            for member in members:
                await asyncio.to_thread(stop_member, member)

    asyncio.run(scenario())


def test_siblings_that_come_together_pull_once() -> None:
    async def scenario() -> None:
        coordinator = LocalCoordinator()
        async with cluster_of(coordinator, {"a": "both", "b": "both"}) as members:
            prompt = prompt_of(2)
            await members["a"].generate(request_of(prompt))
            await told(coordinator, "a")
            requests = [request_of([*prompt, token], f"r{token}") for token in range(6)]
            answers = await asyncio.gather(
                *(members["b"].generate(request) for request in requests)
            )
            for answer, request in zip(answers, requests, strict=True):
                check_answer(answer, request)
            assert members["b"].prefetcher.counters.num_pulls == 1

    asyncio.run(scenario())


def test_without_the_coordinator_everybody_serves_alone_and_it_learns_again() -> None:
    async def scenario() -> None:
        coordinator = LocalCoordinator()
        async with cluster_of(coordinator, {"a": "both", "b": "both"}) as members:
            first, second = request_of(prompt_of(3)), request_of(prompt_of(4))
            await members["a"].generate(first)
            coordinator.is_down = True
            await until(lambda: not members["b"].link.is_registered)
            check_answer(await members["b"].generate(first), first)
            await members["a"].generate(second)
            coordinator.restart()
            coordinator.is_down = False
            await told(coordinator, "a", 2 * NUM_BLOCKS)
            await until(lambda: members["b"].link.is_registered)
            before = members["b"].num_computed_tokens
            check_answer(await members["b"].generate(second), second)
            assert members["b"].num_computed_tokens - before == 2 + NUM_TOKENS - 1

    asyncio.run(scenario())


def test_the_table_equals_what_the_engines_hold() -> None:
    """After many requests on pools too small for them, and a cache clear."""

    async def scenario() -> None:
        coordinator = LocalCoordinator()
        small = [start_member(coordinator, name, num_blocks=40) for name in ("a", "b")]
        try:
            rng = random.Random(9)
            for number in range(60):
                request = request_of(prompt_of(rng.randrange(9), rng.randrange(3, 9)), f"{number}")
                check_answer(await rng.choice(small).generate(request), request)
            small[0].engine.clear_prefix_cache()
            request = request_of(prompt_of(77))
            await small[0].generate(request)
            for member, name in zip(small, ("a", "b"), strict=True):
                await until(lambda member=member, name=name: _is_known(coordinator, member, name))
            assert small[1].engine.stats().num_evictions > 0
            coordinator.inner.check_invariants()
        finally:
            for member in small:
                await asyncio.to_thread(stop_member, member)

    asyncio.run(scenario())


def _is_known(coordinator: LocalCoordinator, member: Member, name: str) -> bool:
    return len(held_by(coordinator, name)) == member.engine.stats().num_cached_blocks


def test_a_dead_holder_costs_a_recomputation_and_no_more() -> None:
    async def scenario() -> None:
        coordinator = LocalCoordinator()
        # Blocks that a living process of this host may write into would stay in quarantine.
        roles: dict[str, Role] = {"a": "both", "b": "both"}
        async with cluster_of(coordinator, roles, is_one_host=False) as members:
            request = request_of(prompt_of(5))
            await members["a"].generate(request)
            await told(coordinator, "a")
            await asyncio.to_thread(members["a"].agent.close)
            check_answer(await members["b"].generate(request), request)
            assert members["b"].prefetcher.counters.num_failed_pulls == 1
            assert (
                members["b"].num_computed_tokens == len(request.prompt_token_ids) + NUM_TOKENS - 1
            )
            await until(lambda: members["b"].engine.stats().num_held_blocks == 0)

    asyncio.run(scenario())


def test_a_request_moves_with_its_pages() -> None:
    """What the ingress does when a replica is taken away: prompt + tokens so far, and whom to
    pull from; nobody asks the coordinator."""

    async def scenario() -> None:
        coordinator = LocalCoordinator()
        async with cluster_of(coordinator, {"a": "both", "b": "both"}) as members:
            request = request_of(prompt_of(6, extra=3))
            whole = await members["a"].generate(request)
            coordinator.is_down = True
            await until(lambda: not members["b"].link.is_registered)
            moved = GenerateRequest(
                request_id=RequestId("r.2"),
                prompt_token_ids=request.prompt_token_ids,
                sampling=request.sampling,
                resumed=(ResumedSequence(tuple(whole[:3])),),
                pull_from=members["a"].agent.info,
            )
            seeded = moved.sampling.seed
            assert seeded is None, "greedy here is a function of the prefix and the request's seed"
            await members["b"].generate(moved)
            # 3 prompt tokens and 3 outputs beyond the full blocks; one block of them was full.
            assert members["b"].num_computed_tokens == (3 + 3 - BLOCK_SIZE) + (NUM_TOKENS - 3 - 1)

    asyncio.run(scenario())


@pytest.mark.parametrize("is_hot", [False, True])
def test_a_prefill_engine_computes_and_the_decode_engine_goes_on(is_hot: bool) -> None:
    async def scenario() -> None:
        coordinator = LocalCoordinator()
        async with cluster_of(coordinator, {"p": "prefill", "d": "decode"}) as members:
            request = request_of(prompt_of(7))
            if is_hot:
                await members["p"].generate(request)
            before = members["p"].num_computed_tokens
            check_answer(await members["d"].generate(request), request)
            assert members["d"].num_computed_tokens == 2 + NUM_TOKENS - 1
            computed = members["p"].num_computed_tokens - before
            assert (computed in {0, 2}) if is_hot else computed >= NUM_BLOCKS * BLOCK_SIZE
            for member in members.values():
                await until(lambda member=member: member.engine.stats().num_held_blocks == 0)
                member.engine.check_invariants()

    asyncio.run(scenario())


def test_without_prefill_engines_the_decode_engine_computes_itself() -> None:
    async def scenario() -> None:
        coordinator = LocalCoordinator()
        roles: dict[str, Role] = {"p": "prefill", "d": "decode"}
        async with cluster_of(coordinator, roles, is_one_host=False) as members:
            request = request_of(prompt_of(8))
            await asyncio.to_thread(members["p"].agent.close)
            check_answer(await members["d"].generate(request), request)
            assert (
                members["d"].num_computed_tokens == len(request.prompt_token_ids) + NUM_TOKENS - 1
            )
            await until(lambda: members["d"].engine.stats().num_held_blocks == 0)

    asyncio.run(scenario())


def test_a_client_that_goes_during_a_pull_leaves_nothing_behind() -> None:
    async def scenario() -> None:
        coordinator = LocalCoordinator()
        async with cluster_of(coordinator, {"p": "prefill", "d": "decode"}) as members:
            for number in range(40):
                request = request_of(prompt_of(100 + number), f"r{number}")
                task = asyncio.create_task(members["d"].generate(request))
                await asyncio.sleep(random.Random(number).random() * 0.02)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            for member in members.values():
                await until(lambda member=member: member.engine.stats().num_held_blocks == 0)
                await until(lambda member=member: member.engine.pages.num_transfers == 0)
                member.engine.check_invariants()
            request = request_of(prompt_of(999))
            check_answer(await members["d"].generate(request), request)

    asyncio.run(scenario())
