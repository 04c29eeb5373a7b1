"""Mailboxes between real processes."""

import multiprocessing
import os
import signal

import pytest

from mailbox_jobs import CAPACITY, message_of, no_pulse, read_all, read_one_then_hang
from pageray.workers.channel.mailbox import Mailbox, PeerDeadError
from pageray.workers.channel.pulse import ProcessPulse


@pytest.mark.parametrize("num_readers", [1, 3])
def test_every_reader_gets_every_message_in_order(num_readers: int) -> None:
    context = multiprocessing.get_context("spawn")
    mailbox = Mailbox.create(num_readers, CAPACITY)
    pipes = [context.Pipe() for _ in range(num_readers)]
    readers = [
        context.Process(target=read_all, args=(mailbox.path, num_readers, reader, 40, pipe[1]))
        for reader, pipe in enumerate(pipes)
    ]
    for process in readers:
        process.start()
    pulses = [ProcessPulse(process.pid or 0, "a reader") for process in readers]

    def all_alive() -> None:
        for pulse in pulses:
            pulse()

    sent = [message_of(number) for number in range(40)]
    for message in sent:
        mailbox.write(message, all_alive)
    for pipe, process in zip(pipes, readers, strict=True):
        assert pipe[0].recv() == sent
        process.join(10)
    mailbox.close()


def test_sequence_numbers_wrap_around() -> None:
    mailbox = Mailbox.create(1, CAPACITY)
    for futex in (mailbox._sequence, mailbox._acknowledged[0]):  # pyright: ignore[reportPrivateUsage]
        futex.store_and_wake(2**32 - 2)
    for number in range(4):
        assert not mailbox.has_message(0)
        mailbox.write(message_of(number), no_pulse)
        assert mailbox.has_message(0)
        assert mailbox.read(0, no_pulse) == message_of(number)
    mailbox.close()


def test_writer_notices_a_reader_that_was_killed() -> None:
    context = multiprocessing.get_context("spawn")
    mailbox = Mailbox.create(1, CAPACITY)
    near, far = context.Pipe()
    process = context.Process(target=read_one_then_hang, args=(mailbox.path, far))
    process.start()
    assert process.pid is not None
    pulse = ProcessPulse(process.pid, "the reader")
    mailbox.write(b"first", pulse)
    assert near.recv() == "read"
    mailbox.write(b"second", pulse)  # fits: the first one was taken
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(PeerDeadError, match="the reader"):
        mailbox.write(b"third", pulse)
    assert not pulse.is_alive
    process.join(10)
    mailbox.close()
    pulse.close()


def test_opening_with_another_shape_is_refused() -> None:
    mailbox = Mailbox.create(2, CAPACITY)
    with pytest.raises(OSError, match="a mailbox for 1"):
        Mailbox.open(mailbox.path, 1, CAPACITY)
    mailbox.close()
