"""Numba as the CPU kernels use it: typed decorators, one thread pool, one cache.

One pool: torch is imported before Numba and Numba told to use OpenMP, so that both share the
OpenMP runtime torch has loaded. With a pool of its own beside torch's, each side's idle threads
spin on the other's cores; a model step became ten times slower.

Fast math: results may be reordered and contracted (`reassoc`, `contract`, `arcp`, `nsz`), which
is what lets sums vectorise. The flags that assume no NaN and no infinity are off: masks use
-inf, and a NaN has to come out as one.

Errors: division by zero gives an infinity, as in NumPy. Python's exception would put a branch into
every loop that divides and keep it from vectorising.

Cache: Numba keys a compiled kernel by its own source file only, yet code of other files is
inlined into it. The cache folder is therefore named by a digest of all sources of this package.
"""

import hashlib
import pathlib
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch  # isort: skip  (before numba, see above)
import numba
from numba.core import config

_P = ParamSpec("_P")
_R = TypeVar("_R")

FAST_MATH = frozenset({"reassoc", "contract", "arcp", "nsz"})
MIN_WORK_PER_THREAD = 1 << 15
"""Elements. Waking a thread costs a few microseconds, in which one thread does about as much."""

prange = numba.prange


def _source_digest(folder: pathlib.Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _configure() -> None:
    # Numba makes these attributes when it is imported; a type checker cannot see them.
    config.THREADING_LAYER = "omp"  # pyright: ignore[reportAttributeAccessIssue]
    if not vars(config)["CACHE_DIR"]:
        folder = pathlib.Path(__file__).resolve().parent
        cache = folder / "__pycache__" / f"numba-{_source_digest(folder)}"
        config.CACHE_DIR = str(cache)  # pyright: ignore[reportAttributeAccessIssue]


_configure()
_MAX_THREADS = cast("int", vars(config)["NUMBA_NUM_THREADS"])


def jit(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compile for one thread, without the GIL; the machine code is cached on disk."""
    return numba.njit(cache=True, nogil=True, error_model="numpy", fastmath=set(FAST_MATH))(
        function
    )


def jit_exact(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Like `jit`, with the order of operations as written (fused multiply-add allowed)."""
    return numba.njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})(function)


def jit_threaded(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Like `jit`, and `prange` loops are spread over the OpenMP threads."""
    return numba.njit(
        cache=True, nogil=True, error_model="numpy", parallel=True, fastmath=set(FAST_MATH)
    )(function)


def num_threads(work: int) -> int:
    """How many threads `work` elements are worth: 1 .. torch's number of threads.

    Numba's count follows torch's: OpenMP rebuilds its team whenever the size changes.
    """
    if torch.get_num_threads() == 1 or work < 2 * MIN_WORK_PER_THREAD:
        return 1
    return all_threads()


def all_threads() -> int:
    """torch's number of threads; Numba's is made the same."""
    limit = min(torch.get_num_threads(), _MAX_THREADS)
    if numba.get_num_threads() != limit:
        numba.set_num_threads(limit)
    return limit


@jit
def part(total: int, num_parts: int, index: int) -> tuple[int, int]:
    """Start and end of part `index` when `total` items are cut into equal parts."""
    return total * index // num_parts, total * (index + 1) // num_parts
