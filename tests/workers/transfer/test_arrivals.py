"""Counting arrivals: once each, only what was asked for, nothing after `close`."""

import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pageray.cluster.ids import BlockId, TransferId
from pageray.workers.transfer.arrivals import Arrivals
from pageray.workers.transfer.checksum import checksum_of
from pageray.workers.transfer.landing import UnexpectedWriteError
from pageray.workers.transfer.mapped_pages import MappedPages
from pageray.workers.transfer.page_write import PageSpan
from transfer_jobs import NUM_BLOCKS, NUM_LAYERS, UNTOUCHED, SharedPools, layout_of

ID = TransferId(3)
BLOCKS = [BlockId(4), BlockId(9), BlockId(2)]


@pytest.fixture
def pages() -> Iterator[MappedPages]:
    pools = SharedPools(layout_of(2))
    yield pools.pages
    pools.close()


def whole(block: int) -> PageSpan:
    return PageSpan(BlockId(block), 0, NUM_LAYERS)


def checksum_at(pages: MappedPages, block: int) -> int:
    return checksum_of(pages.parts(whole(block)))


def test_complete_at_the_expected_count(pages: MappedPages) -> None:
    arrivals = Arrivals(pages)
    expectation = arrivals.expect(ID, BLOCKS)
    checksums = [checksum_at(pages, block) for block in BLOCKS]
    assert arrivals.confirm(ID, [2, 0], [checksums[2], checksums[0]])
    assert expectation.num_counted == 2
    assert not expectation.wait(0.0)
    assert arrivals.confirm(ID, [1], [checksums[1]])
    assert expectation.wait(0.0)


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), max_size=8))
def test_each_write_counts_once_in_any_order(batches: list[list[int]]) -> None:
    layout = layout_of(1, num_layers=1)
    buffer = bytearray((NUM_BLOCKS + 1) * layout.page_bytes(0))
    arrivals = Arrivals(MappedPages(layout, NUM_BLOCKS, [buffer]), with_checksums=False)
    expectation = arrivals.expect(ID, [BlockId(block) for block in (1, 2, 3, 4)])
    seen: set[int] = set()
    for indices in batches:
        assert arrivals.confirm(ID, indices, [])
        seen.update(indices)
        assert expectation.num_counted == len(seen)
        assert expectation.outcome.done() == (len(seen) == 4)


def test_damaged_page_fails_the_transfer_for_good(pages: MappedPages) -> None:
    arrivals = Arrivals(pages)
    expectation = arrivals.expect(ID, BLOCKS)
    checksum = checksum_at(pages, BLOCKS[1])
    pages.rank(1)[BLOCKS[1], 2, 1, 0, 5] ^= 1
    assert not arrivals.confirm(ID, [1], [checksum])
    assert not expectation.wait(0.0)
    assert expectation.outcome.done()
    assert expectation.failure == "the checksum of write 1 is wrong."
    # Right bytes that come now do not bring it back.
    assert not arrivals.confirm(ID, [0], [checksum_at(pages, BLOCKS[0])])
    assert expectation.num_counted == 0


def test_what_was_not_asked_for_is_refused(pages: MappedPages) -> None:
    arrivals = Arrivals(pages)
    arrivals.expect(ID, BLOCKS)
    with pytest.raises(UnexpectedWriteError, match="write 3 of a transfer of 3"):
        arrivals.confirm(ID, [3], [0])
    with pytest.raises(UnexpectedWriteError, match="1 checksums came with 2 writes"):
        arrivals.confirm(ID, [0, 1], [0])
    with pytest.raises(UnexpectedWriteError, match="block=1,"):
        arrivals.begin(ID, [0], [whole(1)])
    with pytest.raises(UnexpectedWriteError):
        arrivals.begin(ID, [0], [PageSpan(BLOCKS[0], 0, 1)])


def test_bad_expectations_are_refused(pages: MappedPages) -> None:
    arrivals = Arrivals(pages)
    for block in (0, NUM_BLOCKS + 1):
        with pytest.raises(ValueError, match=f"block {block} is not one of 1 .. {NUM_BLOCKS}"):
            arrivals.expect(ID, [BlockId(block)])
    with pytest.raises(ValueError, match="names a block twice"):
        arrivals.expect(ID, [BlockId(1), BlockId(1)])
    with pytest.raises(ValueError, match=f"layers 1 .. {NUM_LAYERS + 1} of {NUM_LAYERS}"):
        arrivals.expect(ID, BLOCKS, [(1, NUM_LAYERS + 1)])
    arrivals.expect(ID, BLOCKS)
    with pytest.raises(ValueError, match="is open already"):
        arrivals.expect(ID, BLOCKS)
    arrivals.close(ID)
    arrivals.expect(ID, BLOCKS)


def test_closed_transfer_is_unknown(pages: MappedPages) -> None:
    arrivals = Arrivals(pages)
    expectation = arrivals.expect(ID, BLOCKS)
    landing = arrivals.begin(ID, [0], [whole(BLOCKS[0])])
    assert landing is not None
    arrivals.close(ID)
    arrivals.close(ID)
    assert expectation.outcome.done()
    assert not expectation.wait(0.0)
    assert arrivals.begin(ID, [0], [whole(BLOCKS[0])]) is None
    with landing.permit() as is_granted:
        assert not is_granted
    assert not landing.finish([checksum_at(pages, BLOCKS[0])])
    assert not arrivals.confirm(ID, [0], [checksum_at(pages, BLOCKS[0])])


def test_close_waits_for_the_permit_that_is_out(pages: MappedPages) -> None:
    arrivals = Arrivals(pages)
    arrivals.expect(ID, BLOCKS)
    landing = arrivals.begin(ID, [0], [whole(BLOCKS[0])])
    assert landing is not None
    closer = threading.Thread(target=arrivals.close, args=(ID,))
    with landing.permit() as is_granted:
        assert is_granted
        closer.start()
        closer.join(0.05)
        assert closer.is_alive(), "the transfer was closed under a receiver that was writing"
    closer.join(10)
    assert not closer.is_alive()


def test_newest_bringer_takes_a_write_over(pages: MappedPages) -> None:
    arrivals = Arrivals(pages)
    expectation = arrivals.expect(ID, BLOCKS)
    stalled = arrivals.begin(ID, [0, 1], [whole(block) for block in BLOCKS[:2]])
    retry = arrivals.begin(ID, [1], [whole(BLOCKS[1])])
    assert stalled is not None
    assert retry is not None
    with stalled.permit() as is_granted:
        assert not is_granted
    assert not stalled.finish([0, 0]), "an overtaken bringer neither counts nor fails anything"
    assert expectation.failure is None
    assert retry.finish([checksum_at(pages, BLOCKS[1])])
    assert expectation.num_counted == 1


def test_counted_write_is_not_touched_again(pages: MappedPages) -> None:
    arrivals = Arrivals(pages)
    expectation = arrivals.expect(ID, BLOCKS)
    arrivals.confirm(ID, [0], [checksum_at(pages, BLOCKS[0])])
    again = arrivals.begin(ID, [0, 1], [whole(block) for block in BLOCKS[:2]])
    assert again is not None
    targets = again.targets()
    assert targets[0] is None
    assert targets[1] is not None
    assert [part.nbytes for part in targets[1]] == [pages.layout.page_bytes(r) for r in (0, 1)]
    # What came for the counted one has been thrown away, right or wrong.
    assert again.finish([0, checksum_at(pages, BLOCKS[1])])
    assert expectation.num_counted == 2


def test_empty_transfer_is_complete(pages: MappedPages) -> None:
    assert Arrivals(pages).expect(ID, []).wait(0.0)


def test_outcome_callback_may_close_the_transfer(pages: MappedPages) -> None:
    arrivals = Arrivals(pages)
    expectation = arrivals.expect(ID, BLOCKS[:1])
    expectation.outcome.add_done_callback(lambda _: arrivals.close(ID))
    assert arrivals.confirm(ID, [0], [checksum_at(pages, BLOCKS[0])])
    assert expectation.wait(0.0)
    assert not arrivals.confirm(ID, [0], [0])
    assert pages.rank(0)[BLOCKS[0], 0, 0, 0, 0] == UNTOUCHED
