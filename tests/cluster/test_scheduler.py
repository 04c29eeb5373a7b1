"""The scheduler against ranks that notice every foreign byte (`fake_ranks`)."""

import random
from collections import defaultdict

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_ranks import EOS, VOCAB_SIZE, FakeRanks, continue_alone
from pageray.cluster.admission import EngineLimits, request_seed
from pageray.cluster.block_keys import BlockHasher, root_key
from pageray.cluster.block_pool import BlockPool
from pageray.cluster.errors import ContextLengthError, InvalidParameterError
from pageray.cluster.generation import FinishReason, GenerateRequest, ResumedSequence
from pageray.cluster.ids import RequestId
from pageray.cluster.sampling_params import SamplingParams
from pageray.cluster.scheduler import Scheduler, SchedulerConfig


class Bench:
    """A scheduler with fake ranks, checked after every operation."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 16,
        max_model_len: int = 200,
        budget: int = 32,
        chunked: bool = True,
        caching: bool = True,
        digest_bits: int = 256,
    ) -> None:
        self.limits = EngineLimits(
            vocab_size=VOCAB_SIZE,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            eos_token_ids=(EOS,),
        )
        self.pool = BlockPool(num_blocks)
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_batched_tokens=budget,
                enable_chunked_prefill=chunked,
                enable_prefix_caching=caching,
            ),
            self.limits,
            self.pool,
            BlockHasher(root_key("fake", "int", block_size), block_size, digest_bits),
        )
        self.ranks = FakeRanks(num_blocks, block_size)
        self.requests: dict[RequestId, GenerateRequest] = {}
        self.tokens: dict[RequestId, dict[int, list[int]]] = {}
        self.reasons: dict[tuple[RequestId, int], FinishReason] = {}
        self.finished: set[RequestId] = set()

    def add(self, name: str, prompt: list[int], **sampling: object) -> RequestId:
        request = GenerateRequest(
            request_id=RequestId(name),
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(**sampling),  # pyright: ignore[reportArgumentType]
        )
        self.scheduler.add(request)
        self.requests[request.request_id] = request
        self.tokens[request.request_id] = defaultdict(list)
        self.scheduler.check_invariants()
        return request.request_id

    def step(self, between: object = None) -> bool:
        plan = self.scheduler.schedule()
        self.scheduler.check_invariants()
        if plan is None:
            return False
        assert plan.num_tokens > 0
        if callable(between):
            between()
            self.scheduler.check_invariants()
        for output in self.scheduler.update(self.ranks.execute(plan)):
            for sequence in output.sequences:
                self.tokens[output.request_id][sequence.index] += sequence.token_ids
                if sequence.finish_reason is not None:
                    self.reasons[output.request_id, sequence.index] = sequence.finish_reason
            if output.is_finished:
                self.finished.add(output.request_id)
        self.scheduler.check_invariants()
        return True

    def drain(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.step():
                break
        assert not self.scheduler.has_requests, "the scheduler stalled with requests left"
        assert self.pool.num_held == 0
        assert self.pool.num_available == self.pool.num_blocks

    def assert_as_alone(self, request_id: RequestId) -> None:
        request = self.requests[request_id]
        assert request.sampling.max_tokens is not None
        for index in range(request.sampling.n):
            expected = continue_alone(
                list(request.prompt_token_ids),
                request_seed(request, 0),
                index,
                request.sampling.max_tokens,
            )
            assert self.tokens[request_id][index] == expected
            reason = FinishReason.STOP if expected[-1] == EOS else FinishReason.LENGTH
            assert self.reasons[request_id, index] is reason


def prompt_of(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(EOS) for _ in range(length)]


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 31])
def test_one_request_alone(length: int, chunked: bool) -> None:
    bench = Bench(budget=8 if chunked else 200, chunked=chunked)
    request_id = bench.add("a", prompt_of(random.Random(length), length), max_tokens=20)
    bench.drain()
    bench.assert_as_alone(request_id)


def test_hot_prefix_is_not_computed_again() -> None:
    bench = Bench()
    prompt = prompt_of(random.Random(0), 17)
    bench.add("cold", prompt, max_tokens=1, seed=1)
    bench.drain()
    computed_cold = bench.scheduler.stats.num_computed_tokens
    bench.add("hot", prompt, max_tokens=1, seed=1)
    bench.drain()
    assert computed_cold == 17
    assert bench.scheduler.stats.num_computed_tokens - computed_cold == 1
    assert bench.scheduler.stats.prefix_hits_tokens == 16
    assert bench.scheduler.stats.prefix_queries_tokens == 34
    assert bench.tokens[RequestId("cold")] == bench.tokens[RequestId("hot")]


def test_last_prompt_token_is_always_computed() -> None:
    bench = Bench()
    prompt = prompt_of(random.Random(0), 16)
    for name in ("cold", "hot"):
        bench.add(name, prompt, max_tokens=3)
        bench.drain()
        bench.assert_as_alone(RequestId(name))
    assert bench.scheduler.stats.prefix_hits_tokens == 12


def test_same_prompt_in_one_step_shares_nothing_unwritten() -> None:
    """Too short to wait for each other."""
    bench = Bench(budget=64)
    prompt = prompt_of(random.Random(1), 14)
    for name in ("a", "b"):
        bench.add(name, prompt, max_tokens=5)
    bench.drain()
    assert bench.scheduler.stats.prefix_hits_tokens == 0
    for name in ("a", "b"):
        bench.assert_as_alone(RequestId(name))


def test_other_salt_never_hits() -> None:
    bench = Bench()
    prompt = tuple(prompt_of(random.Random(2), 16))
    for salt in ("tenant-a", "tenant-b", ""):
        bench.scheduler.add(
            GenerateRequest(
                request_id=RequestId(salt or "none"),
                prompt_token_ids=prompt,
                sampling=SamplingParams(max_tokens=1),
                cache_salt=salt,
            )
        )
        bench.tokens[RequestId(salt or "none")] = defaultdict(list)
        bench.drain()
    assert bench.scheduler.stats.prefix_hits_tokens == 0


@pytest.mark.parametrize("length", [4, 6, 8])
def test_n_sequences_fork_from_one_prompt(length: int) -> None:
    bench = Bench(budget=4)
    request_id = bench.add("a", prompt_of(random.Random(3), length), n=4, seed=5, max_tokens=12)
    bench.drain()
    bench.assert_as_alone(request_id)
    # The prompt was computed once; each sequence computes its own outputs but the last.
    outputs = sum(len(tokens) - 1 for tokens in bench.tokens[request_id].values())
    assert bench.scheduler.stats.num_computed_tokens == length + outputs


def test_group_is_admitted_whole_or_not_at_all() -> None:
    bench = Bench(max_num_seqs=4)
    bench.add("a", [1, 2], n=3, max_tokens=8, ignore_eos=True)
    bench.add("b", [3, 4], n=2, max_tokens=1)
    bench.step()
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (1, 1)
    bench.drain()


def test_preemption_changes_no_token() -> None:
    rng = random.Random(4)
    bench = Bench(num_blocks=20, budget=16)
    ids = [
        bench.add(f"r{i}", prompt_of(rng, rng.randrange(1, 20)), n=1 + i % 3, max_tokens=18)
        for i in range(12)
    ]
    bench.drain()
    assert bench.scheduler.stats.num_preemptions > 0
    for request_id in ids:
        bench.assert_as_alone(request_id)


def test_pool_filled_to_the_last_block_finishes() -> None:
    bench = Bench(num_blocks=8, max_num_seqs=8)
    ids = [bench.add(f"r{i}", [i, i + 1], max_tokens=31) for i in range(6)]
    bench.drain()
    for request_id in ids:
        bench.assert_as_alone(request_id)


def test_one_group_that_needs_the_whole_pool() -> None:
    # 6 prompt tokens: 1 shared block, then 4 sequences of up to 6 + 11 - 1 = 16 slots: 3 each.
    bench = Bench(num_blocks=13)
    request_id = bench.add("a", [1, 2, 3, 4, 5, 6], n=4, max_tokens=11, seed=1)
    bench.drain()
    bench.assert_as_alone(request_id)
    with pytest.raises(ContextLengthError, match=r"up to 17 KV blocks .* whole pool has 13"):
        bench.add("b", [1, 2, 3, 4, 5, 6], n=4, max_tokens=12)


def test_request_that_can_never_fit_names_both_numbers() -> None:
    bench = Bench(num_blocks=4, max_model_len=200)
    with pytest.raises(ContextLengthError, match=r"\b6 KV blocks.*whole pool has 4"):
        bench.add("a", [1] * 20, max_tokens=4)
    with pytest.raises(ContextLengthError, match=r"200 tokens.*limited to 200"):
        bench.add("b", [1] * 200, max_tokens=1)
    request_id = bench.add("c", [1] * 3)  # no max_tokens: as many as fit the pool
    bench.drain()
    assert bench.finished == {request_id}


def test_bad_requests_are_refused_at_the_door() -> None:
    bench = Bench()
    with pytest.raises(InvalidParameterError, match="no tokens"):
        bench.add("a", [])
    with pytest.raises(InvalidParameterError, match="token id 101"):
        bench.add("a", [101])
    with pytest.raises(InvalidParameterError, match="n is 17"):
        bench.add("a", [1], n=17, max_tokens=1)
    bench.add("a", [1], max_tokens=1)
    with pytest.raises(InvalidParameterError, match="already being served"):
        bench.add("a", [1], max_tokens=1)


def test_short_prompts_are_not_held_up_by_huge_ones() -> None:
    bench = Bench(num_blocks=200, budget=32, max_model_len=800)
    for i in range(3):
        bench.add(f"huge{i}", prompt_of(random.Random(i), 240), max_tokens=1)
    bench.step()
    short = [bench.add(f"s{i}", prompt_of(random.Random(9 + i), 6), max_tokens=1) for i in (0, 1)]
    bench.step()
    bench.step()
    assert bench.finished >= set(short)


def test_running_sequences_advance_beside_a_prompt() -> None:
    bench = Bench(num_blocks=200, budget=32, max_model_len=800)
    short = bench.add("short", [1, 2, 3], max_tokens=20, ignore_eos=True)
    bench.step()
    bench.add("huge", prompt_of(random.Random(0), 400), max_tokens=1)
    for count in range(2, 10):
        bench.step()
        assert len(bench.tokens[short][0]) == count


def test_abort_in_flight_releases_at_the_acknowledgement() -> None:
    bench = Bench()
    request_id = bench.add("a", [1] * 10, n=4, max_tokens=50, ignore_eos=True)
    bench.step()
    bench.step(lambda: bench.scheduler.abort(request_id))
    assert bench.pool.num_held == 0
    assert not bench.scheduler.has_requests
    assert not bench.scheduler.abort(request_id)


def test_finishing_one_sequence_leaves_its_siblings() -> None:
    bench = Bench()
    request_id = bench.add("a", [1] * 5, n=3, max_tokens=10, seed=3, ignore_eos=True)
    bench.step()
    assert bench.scheduler.finish_sequence(request_id, 0)  # the leader
    bench.step(lambda: bench.scheduler.finish_sequence(request_id, 2))
    bench.drain()
    assert [len(bench.tokens[request_id][i]) for i in range(3)] == [1, 10, 2]
    assert not bench.scheduler.finish_sequence(request_id, 1)


@pytest.mark.parametrize("digest_bits", [1, 4, 256])
def test_colliding_digests_change_no_token(digest_bits: int) -> None:
    rng = random.Random(6)
    bench = Bench(num_blocks=40, digest_bits=digest_bits)
    stems = [prompt_of(rng, 12) for _ in range(3)]
    ids = [
        bench.add(
            f"r{i}", stems[i % 3][: rng.randrange(4, 13)] + prompt_of(rng, i % 5), max_tokens=8
        )
        for i in range(30)
    ]
    bench.drain()
    for request_id in ids:
        bench.assert_as_alone(request_id)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_mix_of_operations_keeps_the_invariants(data: st.DataObject) -> None:
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    bench = Bench(
        num_blocks=data.draw(st.integers(12, 40)),
        block_size=data.draw(st.sampled_from([1, 2, 4, 7])),
        budget=data.draw(st.integers(8, 40)),
        max_num_seqs=8,
        max_model_len=64,
        caching=data.draw(st.booleans()),
        digest_bits=data.draw(st.sampled_from([3, 256])),
    )
    stems = [prompt_of(rng, 10) for _ in range(2)]
    aborted: set[RequestId] = set()
    for number in range(data.draw(st.integers(1, 40))):
        if rng.random() < 0.5:
            stem = stems[rng.randrange(2)][: rng.randrange(0, 11)]
            try:
                bench.add(
                    f"r{number}",
                    [*stem, *prompt_of(rng, rng.randrange(0, 6)), 1],
                    n=rng.choice([1, 1, 1, 2, 3]),
                    max_tokens=rng.randrange(1, 14),
                )
            except ContextLengthError:
                continue

        def interrupt() -> None:
            for request_id in list(bench.requests):
                if rng.random() < 0.05 and request_id not in bench.finished:
                    aborted.add(request_id)
                    bench.scheduler.abort(request_id)

        if rng.random() < 0.5:
            interrupt()
        bench.step(interrupt if rng.random() < 0.3 else None)
    bench.drain()
    assert bench.finished | aborted == set(bench.requests)
    for request_id in bench.finished - aborted:
        bench.assert_as_alone(request_id)


def test_simulation_of_ten_thousand_steps() -> None:
    rng = random.Random(20)
    bench = Bench(num_blocks=48, budget=48, max_num_seqs=12, max_model_len=120)
    stems = [prompt_of(rng, 24) for _ in range(4)]
    number = 0
    aborted: set[RequestId] = set()
    checked = 0
    while bench.scheduler.stats.num_steps < 10_000:
        if bench.scheduler.num_waiting < 4:
            stem = rng.choice(stems)[: rng.randrange(0, 25)]
            bench.add(
                f"r{number}",
                [*stem, *prompt_of(rng, rng.randrange(0, 20)), 1],
                n=rng.choice([1, 1, 1, 1, 2, 4]),
                max_tokens=rng.randrange(1, 24),
            )
            number += 1
        victims = [r for r in bench.requests if r not in bench.finished | aborted]
        if victims and rng.random() < 0.03:
            aborted.add(victims[rng.randrange(len(victims))])
            bench.scheduler.abort(sorted(aborted)[-1])
            for request_id in aborted:
                bench.scheduler.abort(request_id)
        bench.step()
        for request_id in list(bench.requests):
            if request_id in bench.finished:
                bench.assert_as_alone(request_id)
                checked += 1
            if request_id in bench.finished or request_id in aborted:
                del bench.requests[request_id]
    bench.drain()
    assert bench.scheduler.stats.num_preemptions > 0
    assert bench.scheduler.stats.prefix_hits_tokens > 0
    assert checked > 500
    assert len(aborted) > 20


@pytest.mark.parametrize("num_done", [1, 3, 4, 5, 11])
@pytest.mark.parametrize("n", [1, 3])
def test_a_resumed_request_goes_on_with_the_next_token(n: int, num_done: int) -> None:
    whole = Bench()
    prompt = prompt_of(random.Random(num_done), 7)
    sampling = {"n": n, "max_tokens": 12, "ignore_eos": True}
    request_id = whole.add("a", prompt, **sampling)
    whole.drain()
    expected = whole.tokens[request_id]

    other = Bench()
    request = msgspec.structs.replace(
        whole.requests[request_id],
        resumed=tuple(
            # With several sequences, one has got further than the others.
            ResumedSequence(tuple(expected[index][: num_done - (index > 0)]))
            for index in range(n)
        ),
    )
    other.scheduler.add(request)
    for index in range(n):
        other.tokens.setdefault(request_id, {})[index] = list(
            request.resumed[index].output_token_ids
        )
    other.drain()
    assert other.tokens[request_id] == expected


def test_a_finished_resumed_sequence_stays_finished() -> None:
    bench = Bench()
    request = GenerateRequest(
        request_id=RequestId("a"),
        prompt_token_ids=(1, 2, 3),
        sampling=SamplingParams(n=2, max_tokens=4, ignore_eos=True),
        resumed=(ResumedSequence((5, 6), is_finished=True), ResumedSequence((7,))),
    )
    bench.scheduler.add(request)
    bench.tokens[request.request_id] = defaultdict(list)
    bench.drain()
    assert list(bench.tokens[request.request_id]) == [1]
    assert len(bench.tokens[request.request_id][1]) == 3


@pytest.mark.parametrize(
    ("resumed", "message"),
    [
        ((ResumedSequence((1,)),) * 2, "2 entries for n = 1"),
        ((ResumedSequence((1, 2, 3, 4)),), "max_tokens is 4"),
        ((ResumedSequence((VOCAB_SIZE,)),), "outside the vocabulary"),
        ((ResumedSequence((1,), is_finished=True),), "Every resumed sequence"),
    ],
)
def test_impossible_resumption_is_refused(
    resumed: tuple[ResumedSequence, ...], message: str
) -> None:
    request = GenerateRequest(
        request_id=RequestId("a"),
        prompt_token_ids=(1, 2, 3),
        sampling=SamplingParams(max_tokens=4),
        resumed=resumed,
    )
    with pytest.raises(InvalidParameterError, match=message):
        Bench().scheduler.add(request)


def test_outputs_tell_their_position() -> None:
    bench = Bench()
    bench.add("a", [1, 2, 3], max_tokens=6, ignore_eos=True)
    positions: list[int] = []
    while (plan := bench.scheduler.schedule()) is not None:
        for output in bench.scheduler.update(bench.ranks.execute(plan)):
            positions += [sequence.position for sequence in output.sequences]
    assert positions == [0, 1, 2, 3, 4, 5]


def test_siblings_that_come_at_once_compute_their_prefix_once() -> None:
    bench = Bench(num_blocks=120, budget=256)
    rng = random.Random(8)
    shared = prompt_of(rng, 40)
    names = [bench.add(f"{n}", shared + prompt_of(rng, 6), max_tokens=3) for n in range(8)]
    bench.drain()
    for name in names:
        bench.assert_as_alone(name)
    outputs = sum(len(tokens[0]) - 1 for tokens in bench.tokens.values())
    assert bench.scheduler.stats.num_computed_tokens == 40 + 8 * 6 + outputs
    assert bench.scheduler.stats.num_steps <= 1 + 3


def test_others_overtake_those_that_wait_for_a_sibling() -> None:
    bench = Bench(num_blocks=120, budget=256)
    rng = random.Random(9)
    shared = prompt_of(rng, 40)
    bench.add("first", [*shared, 1], max_tokens=2, ignore_eos=True)
    bench.add("sibling", [*shared, 2], max_tokens=2, ignore_eos=True)
    bench.add("other", prompt_of(rng, 30), max_tokens=2, ignore_eos=True)
    bench.step()
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (2, 1)
    bench.drain()
    for name in ("first", "sibling", "other"):
        assert len(bench.tokens[RequestId(name)][0]) == 2


def test_a_sibling_does_not_wait_for_an_aborted_one() -> None:
    bench = Bench(num_blocks=120, budget=16)
    shared = prompt_of(random.Random(10), 60)
    first = bench.add("first", [*shared, 1], max_tokens=2)
    sibling = bench.add("sibling", [*shared, 2], max_tokens=2)
    bench.step(between=lambda: bench.scheduler.abort(first))
    bench.drain()
    bench.assert_as_alone(sibling)
