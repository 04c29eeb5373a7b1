"""How far each rank has got, in a word of memory that all processes of the engine share.

Rank 0's answer to a step does not say that the other ranks have written their pages of it.
Whoever reads or reuses pages from outside the step loop (transfers) looks here first.
"""

import ctypes
import mmap
import os
import threading
import time

from pageray.cluster.errors import EngineDeadError

_WORD_BYTES = 64
"""Each rank's word has a cache line of its own."""
_LAYER_BITS = 16
_ALL_LAYERS = (1 << _LAYER_BITS) - 1
_FIRST_POLL_S = 20e-6
_LAST_POLL_S = 2e-3


class StepProgress:
    """One rank's step on a board, as `pageray.kernels.ops.LayerProgress` has it."""

    def __init__(self, board: "ProgressBoard", rank: int) -> None:
        self._board = board
        self._rank = rank
        self._step_id = 0

    def begin(self, step_id: int) -> None:
        self._step_id = step_id

    def __call__(self, num_layers: int) -> None:
        self._board.layers_written(self._rank, self._step_id, num_layers)

    def word(self) -> tuple[int, int]:
        return self._board.word(self._rank, self._step_id)

    def end(self) -> None:
        """All of the step is written."""
        self._board.step_written(self._rank, self._step_id)


class ProgressBoard:
    """One word per rank: (step, layers of it whose KV is written). Steps only grow.

    Written by each rank for itself, read by anyone. On weakly ordered processors a reader could
    see the word before the bytes; page checksums are what notices that.
    """

    def __init__(self, memfd: int, size: int) -> None:
        self._memfd = memfd
        self._size = size
        self._mapping = mmap.mmap(memfd, size * _WORD_BYTES)
        self._words = memoryview(self._mapping).cast("Q")
        # The address outlives the view, which would keep the mapping from being closed.
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self._lock = threading.Lock()
        self._is_closed = False

    @classmethod
    def create(cls, size: int) -> "ProgressBoard":
        memfd = os.memfd_create("pageray-progress", os.MFD_CLOEXEC)
        os.ftruncate(memfd, size * _WORD_BYTES)
        return cls(memfd, size)

    @classmethod
    def open(cls, path: str, size: int) -> "ProgressBoard":
        """Map the board that another process of this host created (its `path`)."""
        return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC), size)

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._memfd}"

    def layers_written(self, rank: int, step_id: int, num_layers: int) -> None:
        """`rank` has written the KV of the first `num_layers` layers of a step."""
        self._words[rank * _WORD_BYTES // 8] = step_id << _LAYER_BITS | num_layers

    def word(self, rank: int, step_id: int) -> tuple[int, int]:
        """(address of the rank's word, what it holds before the step's first layer is written); for
        compiled code, which adds the number of layers. Good until `close`."""
        return self._address + rank * _WORD_BYTES, step_id << _LAYER_BITS

    def step_written(self, rank: int, step_id: int) -> None:
        self.layers_written(rank, step_id, _ALL_LAYERS)

    def num_layers_written(self, step_id: int) -> int:
        """By the slowest rank; at least the model's number of layers once the step is done.

        Raises `EngineDeadError` after `close`.
        """
        goal = step_id << _LAYER_BITS
        with self._lock:
            if self._is_closed:
                raise EngineDeadError("The engine has been shut down.")
            slowest = min(self._words[rank * _WORD_BYTES // 8] for rank in range(self._size))
        return min(max(0, slowest - goal), _ALL_LAYERS)

    def wait_until_written(self, step_id: int, timeout_s: float) -> None:
        """Return once every rank has written all of a step.

        Raises `EngineDeadError` after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        pause_s = _FIRST_POLL_S
        while self.num_layers_written(step_id) < _ALL_LAYERS:
            if time.monotonic() > deadline:
                raise EngineDeadError(f"A rank has not written step {step_id} in {timeout_s:g} s.")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_POLL_S)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._words.release()
        self._mapping.close()
        os.close(self._memfd)
