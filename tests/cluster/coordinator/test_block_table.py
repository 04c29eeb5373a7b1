"""The cluster block table against sets of keys per incarnation."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pageray.cluster.coordinator.block_table import (
    NUM_SHARDS,
    ClusterBlockTable,
    IncarnationId,
    hint_of,
)
from pageray.cluster.ids import BlockKey


def key_of(number: int) -> BlockKey:
    return BlockKey(random.Random(number).randbytes(32))


CHAIN = [key_of(number) for number in range(300)]
BRANCH = CHAIN[:100] + [key_of(number) for number in range(1000, 1200)]


def test_runs_of_engines_that_hold_different_depths() -> None:
    table = ClusterBlockTable()
    depths = [0, 1, 2, 99, 100, 101, 299, 300, 300]
    incarnations = [table.open() for _ in depths]
    for incarnation, depth in zip(incarnations, depths, strict=True):
        table.store(incarnation, CHAIN[:depth])
    expected = {i: depth for i, depth in zip(incarnations, depths, strict=True) if depth}
    assert table.longest_runs(CHAIN) == expected
    assert table.longest_runs(BRANCH) == {i: min(depth, 100) for i, depth in expected.items()}
    assert table.longest_runs(CHAIN[:1]) == dict.fromkeys(expected, 1)
    assert table.longest_runs(CHAIN[1:2]) == {i: 1 for i, depth in expected.items() if depth > 1}
    assert table.longest_runs([]) == {}
    assert table.longest_runs([key_of(9999), *CHAIN]) == {}
    assert table.num_entries == sum(depths)
    assert table.num_keys == 300


@given(
    depths=st.lists(st.integers(0, 60), max_size=12),
    branch_depths=st.lists(st.integers(0, 60), max_size=12),
    asked=st.integers(0, 70),
)
def test_divided_lookup_equals_the_linear_one(
    depths: list[int], branch_depths: list[int], asked: int
) -> None:
    table = ClusterBlockTable()
    trunk = CHAIN[:20]
    other = trunk + BRANCH[100:150]
    for chain, ends in ((CHAIN[:60], depths), (other, branch_depths)):
        for depth in ends:
            table.store(table.open(), chain[:depth])
    for chain in (CHAIN[:asked], other[:asked]):
        assert table.longest_runs(chain) == table.longest_runs_linear(chain)


@given(st.data())
def test_a_hole_over_credits_at_most_up_to_the_last_block_held(data: st.DataObject) -> None:
    table = ClusterBlockTable()
    held: dict[IncarnationId, set[int]] = {}
    for _ in range(data.draw(st.integers(1, 6))):
        positions = data.draw(st.sets(st.integers(0, 39)))
        incarnation = table.open()
        held[incarnation] = positions
        table.store(incarnation, [CHAIN[i] for i in positions])
    exact = table.longest_runs_linear(CHAIN[:40])
    found = table.longest_runs(CHAIN[:40])
    assert found.keys() == exact.keys() == {i for i, positions in held.items() if 0 in positions}
    for incarnation, run in found.items():
        assert exact[incarnation] <= run <= max(held[incarnation]) + 1


def test_dropping_forgets_at_once_and_the_bit_returns_only_after_a_whole_sweep() -> None:
    table = ClusterBlockTable()
    gone, stays = table.open(), table.open()
    table.store(gone, CHAIN)
    table.store(stays, CHAIN[:10])
    table.drop(gone)
    assert table.longest_runs(CHAIN) == {stays: 10}
    assert table.num_entries == 10
    assert table.num_keys == 300
    assert table.open() not in (gone, stays)
    table.sweep(max_entries=NUM_SHARDS // 2)
    table.check_invariants()
    # It dies while a sweep is under way that has passed some of its entries: not freed by that one.
    late = table.open()
    table.store(late, CHAIN[:10])
    table.drop(late)
    table.sweep(max_entries=2 * NUM_SHARDS)
    table.check_invariants()
    assert table.has_dead
    reused = table.open()
    assert reused == gone
    assert table.longest_runs(CHAIN) == {stays: 10}
    table.sweep(max_entries=2 * NUM_SHARDS)
    assert not table.has_dead
    assert table.num_keys == 10
    table.check_invariants()


def test_a_void_id_raises() -> None:
    table = ClusterBlockTable()
    incarnation = table.open()
    table.drop(incarnation)
    for use in (table.drop, table.hints_held):
        with pytest.raises(KeyError):
            use(incarnation)
    with pytest.raises(KeyError):
        table.store(incarnation, CHAIN)


def test_keys_cut_to_a_few_bits_stay_apart() -> None:
    # As `BlockHasher(digest_bits=4)` makes them: the difference is in the last byte.
    short = [BlockKey(number.to_bytes(32, "big")) for number in range(16)]
    assert len({hint_of(key) for key in short}) == 16


class TableMachine(RuleBasedStateMachine):
    """Any order of operations, beside plain sets."""

    def __init__(self) -> None:
        super().__init__()
        self.table = ClusterBlockTable()
        self.truth: dict[IncarnationId, set[BlockKey]] = {}

    @rule()
    def open(self) -> None:
        incarnation = self.table.open()
        assert incarnation not in self.truth
        self.truth[incarnation] = set()

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        if self.truth:
            incarnation = data.draw(st.sampled_from(sorted(self.truth)))
            self.table.drop(incarnation)
            del self.truth[incarnation]

    @rule(data=st.data(), keys=st.lists(st.sampled_from(CHAIN[:30]), max_size=8))
    def store(self, data: st.DataObject, keys: list[BlockKey]) -> None:
        if self.truth:
            incarnation = data.draw(st.sampled_from(sorted(self.truth)))
            self.table.store(incarnation, keys)
            self.truth[incarnation] |= set(keys)

    @rule(data=st.data(), keys=st.lists(st.sampled_from(CHAIN[:30]), max_size=8))
    def remove(self, data: st.DataObject, keys: list[BlockKey]) -> None:
        if self.truth:
            incarnation = data.draw(st.sampled_from(sorted(self.truth)))
            self.table.remove(incarnation, keys)
            self.truth[incarnation] -= set(keys)

    @rule(max_entries=st.sampled_from([1, NUM_SHARDS // 3, 2 * NUM_SHARDS]))
    def sweep(self, max_entries: int) -> None:
        self.table.sweep(max_entries)

    @invariant()
    def equals_the_sets(self) -> None:
        self.table.check_invariants()
        assert self.table.num_entries == sum(map(len, self.truth.values()))
        for incarnation, keys in self.truth.items():
            assert self.table.hints_held(incarnation) == set(map(hint_of, keys))
        for key in CHAIN[:30]:
            holders = {i for i, keys in self.truth.items() if key in keys}
            assert self.table.longest_runs([key]) == dict.fromkeys(holders, 1)


TestTable = TableMachine.TestCase
TestTable.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
