"""Blocks change hands again and again while their old sources keep on writing."""

import threading

from pageray.cluster.ids import TransferId
from pageray.workers.transfer.outgoing import OutgoingPages
from pageray.workers.transfer.page_writer import TransferError
from pageray.workers.transfer.socket_writer import SocketWriter
from transfer_jobs import (
    SECRET,
    UNTOUCHED,
    Destination,
    SharedPools,
    fill_with_pattern,
    layout_of,
    whole_writes,
)

NUM_BLOCKS = 4
HUGE_PAGES = layout_of(1, block_size=65_536)
"""19 MB each, so that a transfer is nearly always closed in the middle of one."""
NUM_ROUNDS = 12


def test_no_byte_is_written_after_close() -> None:
    destination = Destination("sockets", HUGE_PAGES, NUM_BLOCKS)
    ours = SharedPools(HUGE_PAGES, NUM_BLOCKS)
    fill_with_pattern(ours.pages)
    writes = whole_writes([(block, block) for block in range(1, NUM_BLOCKS + 1)])
    pool = destination.pages.rank(0).reshape(-1)
    samples = pool[::4096]
    num_cut = 0
    for number in range(NUM_ROUNDS):
        transfer_id = TransferId(number)
        pool[:] = UNTOUCHED
        expectation = destination.expect(transfer_id, writes)
        writer = SocketWriter(
            OutgoingPages(ours.pages, HUGE_PAGES), destination.endpoint().address, SECRET
        )

        def write(writer: SocketWriter = writer, transfer_id: TransferId = transfer_id) -> None:
            try:
                writer.write(transfer_id, writes)
            except TransferError:
                return

        source = threading.Thread(target=write)
        source.start()
        # Close at ever later points of the transfer.
        num_awaited = samples.size * number // (2 * NUM_ROUNDS)
        while source.is_alive() and (samples != UNTOUCHED).sum() < num_awaited:
            pass
        destination.arrivals.close(transfer_id)
        at_close = samples.copy()
        num_cut += expectation.num_counted < NUM_BLOCKS
        source.join(20)
        assert not source.is_alive()
        assert (samples == at_close).all(), f"round {number}: a late page was written"
        writer.close()
    assert num_cut > NUM_ROUNDS // 2
    destination.close()
    ours.close()
