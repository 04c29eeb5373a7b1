"""Sleeping on a word of shared memory until another process changes it (Linux futex(2))."""

import ctypes
import os
import platform

_FUTEX_WAIT = 0
_FUTEX_WAKE = 1
_SYSCALL_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98}
_WAKE_ALL = 2**31 - 1


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class Futex:
    """The futex on one aligned 32-bit word of a writable buffer shared between processes."""

    def __init__(self, buffer: memoryview, offset: int) -> None:
        machine = platform.machine()
        if machine not in _SYSCALL_NUMBERS:
            raise OSError(f"no futex system call number is known for {machine!r}.")
        self._number = _SYSCALL_NUMBERS[machine]
        self._word = ctypes.c_uint32.from_buffer(buffer, offset)
        self._address = ctypes.addressof(self._word)
        # ctypes releases the interpreter lock around the call, so other threads go on.
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall

    def load(self) -> int:
        return self._word.value

    def store_and_wake(self, value: int) -> None:
        """Set the word and wake every process that waits on it."""
        self._word.value = value
        self._call(_FUTEX_WAKE, _WAKE_ALL, None)

    def wait(self, seen: int, timeout_s: float) -> None:
        """Sleep while the word is still `seen`, at most `timeout_s` seconds.

        May return early; the caller looks at the word again. `seen` must be the value the caller
        acted on: reading the word anew for this call could miss a wake-up.
        """
        whole = int(timeout_s)
        timeout = _Timespec(whole, int((timeout_s - whole) * 1e9))
        self._call(_FUTEX_WAIT, seen, ctypes.byref(timeout))

    def _call(self, operation: int, value: int, timeout: object) -> None:
        result = self._syscall(
            ctypes.c_long(self._number),
            ctypes.c_void_p(self._address),
            ctypes.c_int(operation),
            ctypes.c_uint32(value),
            timeout,
            None,
            ctypes.c_uint32(0),
        )
        if result < 0:
            error = ctypes.get_errno()
            if error not in _HARMLESS:
                raise OSError(error, os.strerror(error))

    def close(self) -> None:
        """Let go of the buffer, which could not be closed otherwise."""
        del self._word


_EAGAIN, _EINTR, _ETIMEDOUT = 11, 4, 110
_HARMLESS = (_EAGAIN, _EINTR, _ETIMEDOUT)
