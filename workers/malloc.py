"""Keeping freed memory in the process, for steps and transports that allocate megabytes anew."""

import ctypes

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


def keep_freed_memory() -> bool:
    """Tell glibc not to give large blocks back to the system after each use.

    A step allocates activations for every layer, and gRPC every message; with the defaults each
    large one is a fresh mapping, whose page faults cost as much as what is done with it. The price is resident memory: up to the largest amount that
    was in use at once. For the whole process; False where the C library has no `mallopt`.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        return False
    settings = ((_M_MMAP_THRESHOLD, 1 << 30), (_M_TRIM_THRESHOLD, 1 << 30), (_M_TOP_PAD, 64 << 20))
    return all(library.mallopt(name, value) == 1 for name, value in settings)
