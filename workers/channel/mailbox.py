"""One-way messages through shared memory: one writer, a fixed number of readers.

Every reader gets every message, in order. The writer puts a message into the buffer, bumps the
word `sequence` and wakes the readers; a reader copies it out and sets its own `acknowledged` word
to that number. The writer starts the next message only when all readers have taken the last one.
A message larger than the buffer goes in fragments.

    word 0         sequence       futex, bumped by the writer
    words 1..N     acknowledged   futex, one per reader
    then           length, flags, crc32 of the fragment, then the fragment

The checksum makes the order in which the two processes see the bytes irrelevant (weakly ordered
processors): a reader that sees the bump before the bytes simply looks again.
"""

import mmap
import os
import struct
import time
import zlib
from collections.abc import Callable

from pageray.workers.channel.futex import Futex

_WORD_BYTES = 64
"""Each word has a cache line of its own."""
_HEADER = struct.Struct("<III")
_MORE = 1
_SPIN_S = 50e-6
_WAIT_S = 0.05
"""A waiting side looks at the other's pulse this often."""

DEFAULT_CAPACITY = 1 << 20


class PeerDeadError(Exception):
    """The process at the other end is gone, or did not answer in time."""


Pulse = Callable[[], None]
"""Called now and then while waiting; raises `PeerDeadError` to give the waiting up."""


class Mailbox:
    """The shared buffer and its words. `write` on one side, `read(reader)` on the others."""

    def __init__(self, memfd: int, num_readers: int, capacity: int) -> None:
        self._memfd = memfd
        self._num_readers = num_readers
        self._capacity = capacity
        self._mapping = mmap.mmap(memfd, _mailbox_bytes(num_readers, capacity))
        self._buffer = memoryview(self._mapping)
        self._sequence = Futex(self._buffer, 0)
        self._acknowledged = [
            Futex(self._buffer, (1 + reader) * _WORD_BYTES) for reader in range(num_readers)
        ]
        self._data = (1 + num_readers) * _WORD_BYTES

    @classmethod
    def create(cls, num_readers: int, capacity: int = DEFAULT_CAPACITY) -> "Mailbox":
        memfd = os.memfd_create("pageray-mailbox", os.MFD_CLOEXEC)
        os.ftruncate(memfd, _mailbox_bytes(num_readers, capacity))
        return cls(memfd, num_readers, capacity)

    @classmethod
    def open(cls, path: str, num_readers: int, capacity: int = DEFAULT_CAPACITY) -> "Mailbox":
        """Map a mailbox that another process of this host created (its `path`).

        Raises OSError when that process is gone or is on another host.
        """
        memfd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        size, needed = os.fstat(memfd).st_size, _mailbox_bytes(num_readers, capacity)
        if size != needed:
            os.close(memfd)
            raise OSError(f"{path} has {size} bytes, a mailbox for {num_readers} has {needed}.")
        return cls(memfd, num_readers, capacity)

    @property
    def path(self) -> str:
        """Where another process of this host and user can open it while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self._memfd}"

    def write(self, message: bytes, pulse: Pulse) -> None:
        """Hand `message` to every reader. Returns once it is in the buffer, not once it is read."""
        view = memoryview(message)
        fragments = [
            view[start : start + self._capacity] for start in range(0, len(view), self._capacity)
        ] or [view]
        for number, fragment in enumerate(fragments, start=1):
            sequence = self._sequence.load()
            for acknowledged in self._acknowledged:
                _wait_until(acknowledged, lambda value, goal=sequence: value == goal, pulse)
            flags = _MORE if number < len(fragments) else 0
            start = self._data + _HEADER.size
            self._buffer[start : start + len(fragment)] = fragment
            _HEADER.pack_into(
                self._buffer,
                self._data,
                len(fragment),
                flags,
                zlib.crc32(fragment, _next(sequence)),
            )
            self._sequence.store_and_wake(_next(sequence))

    def has_message(self, reader: int) -> bool:
        return self._sequence.load() != self._acknowledged[reader].load()

    def read(self, reader: int, pulse: Pulse) -> bytes:
        """The next message; waits for it."""
        acknowledged = self._acknowledged[reader]
        message = bytearray()
        while True:
            last = acknowledged.load()
            _wait_until(self._sequence, lambda value, seen=last: value != seen, pulse)
            fragment, flags = self._take(_next(last), pulse)
            message += fragment
            acknowledged.store_and_wake(_next(last))
            if not flags & _MORE:
                return bytes(message)

    def _take(self, sequence: int, pulse: Pulse) -> tuple[bytes, int]:
        while True:
            length, flags, checksum = _HEADER.unpack_from(self._buffer, self._data)
            start = self._data + _HEADER.size
            fragment = bytes(self._buffer[start : start + min(length, self._capacity)])
            # The sequence number seeds the checksum, so the last message cannot pass for this one.
            if zlib.crc32(fragment, sequence) == checksum:
                return fragment, flags
            pulse()

    def close(self) -> None:
        for futex in (self._sequence, *self._acknowledged):
            futex.close()
        self._buffer.release()
        self._mapping.close()
        os.close(self._memfd)


def _mailbox_bytes(num_readers: int, capacity: int) -> int:
    return (1 + num_readers) * _WORD_BYTES + _HEADER.size + capacity


def _wait_until(futex: Futex, is_done: Callable[[int], bool], pulse: Pulse) -> None:
    """Spin briefly, for answers that are already on their way, then sleep."""
    deadline = time.perf_counter() + _SPIN_S
    while True:
        value = futex.load()
        if is_done(value):
            return
        if time.perf_counter() > deadline:
            futex.wait(value, _WAIT_S)
            pulse()


def _next(sequence: int) -> int:
    return (sequence + 1) & 0xFFFFFFFF
