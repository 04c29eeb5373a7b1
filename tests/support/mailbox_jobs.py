"""What the reader processes of `test_mailbox.py` do; apart, so that they can import it."""

import threading
from multiprocessing.connection import Connection

from pageray.workers.channel.mailbox import Mailbox

CAPACITY = 4096
SIZES = (0, 1, 63, CAPACITY - 1, CAPACITY, CAPACITY + 1, 5 * CAPACITY + 7)


def message_of(number: int) -> bytes:
    return bytes((number + i) % 251 for i in range(SIZES[number % len(SIZES)]))


def no_pulse() -> None:
    pass


def read_all(path: str, num_readers: int, reader: int, count: int, answer: Connection) -> None:
    mailbox = Mailbox.open(path, num_readers, CAPACITY)
    answer.send([mailbox.read(reader, no_pulse) for _ in range(count)])


def read_one_then_hang(path: str, answer: Connection) -> None:
    mailbox = Mailbox.open(path, 1, CAPACITY)
    mailbox.read(0, no_pulse)
    answer.send("read")
    threading.Event().wait()
