"""Cancelling at the source: yes means that nothing is in flight and nothing will be."""

import threading

import pytest

from pageray.cluster.ids import EngineId, Epoch, TransferId
from pageray.workers.transfer.departures import Departures
from pageray.workers.transfer.page_writer import TransferStoppedError, check_stop

DEPARTURE = (EngineId("engine-1"), Epoch(4), TransferId(9))


def test_cancel_waits_for_the_write_and_tells_it_to_stop() -> None:
    departures = Departures()
    page_started, let_page_end = threading.Event(), threading.Event()
    ended: list[str] = []

    def write() -> None:
        with departures.writing(DEPARTURE) as should_stop:
            check_stop(should_stop, DEPARTURE[2])
            page_started.set()
            assert let_page_end.wait(10)
            with pytest.raises(TransferStoppedError):
                check_stop(should_stop, DEPARTURE[2])
            ended.append("stopped")

    writer = threading.Thread(target=write)
    writer.start()
    assert page_started.wait(10)
    assert not departures.cancel(DEPARTURE, 0.02), "a page is still being written"
    let_page_end.set()
    assert departures.cancel(DEPARTURE, 10)
    writer.join(10)
    assert ended == ["stopped"]


def test_cancelled_transfer_never_starts() -> None:
    departures = Departures()
    assert departures.cancel(DEPARTURE, 0.0)
    with (
        pytest.raises(TransferStoppedError, match="9 was cancelled"),
        departures.writing(DEPARTURE),
    ):
        pass
    other_epoch = (DEPARTURE[0], Epoch(5), DEPARTURE[2])
    with departures.writing(other_epoch) as should_stop:
        assert not should_stop()


def test_cancel_waits_for_all_writers_of_a_transfer() -> None:
    departures = Departures()
    with departures.writing(DEPARTURE):
        with departures.writing(DEPARTURE):
            pass
        assert not departures.cancel(DEPARTURE, 0.0)
    assert departures.cancel(DEPARTURE, 0.0)
    departures.forget_engine(DEPARTURE[0])
    with departures.writing(DEPARTURE) as should_stop:
        assert not should_stop()
