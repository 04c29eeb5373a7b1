"""One head of q, k or v in float32, on its way from the projection to its place.

Three short loops through a buffer that stays in the first cache, because each of them vectorises:
a single one from source to target reads and writes so many arrays that LLVM no longer checks at
run time whether they overlap.
"""

from pageray.kernels.cpu.jit import jit
from pageray.kernels.cpu.memory import Pointer, flat
from pageray.kernels.cpu.numerics import narrow, widen
from pageray.kernels.cpu.rms_norm import norm_factor, normalised


@jit
def load_head(x_at: Pointer, start: int, head_dim: int, buffer_at: Pointer) -> None:
    """buffer = the head that starts at element `start`."""
    x, buffer = flat(x_at, start), flat(buffer_at, 0)
    for d in range(head_dim):
        buffer[d] = widen(x[d])


@jit
def load_normalised_head(
    x_at: Pointer, start: int, head_dim: int, weight_at: Pointer, eps: float, buffer_at: Pointer
) -> None:
    """buffer = rms_norm(the head that starts at element `start`), not rounded."""
    x, weight, buffer = flat(x_at, start), flat(weight_at, 0), flat(buffer_at, 0)
    factor = norm_factor(x_at, start, head_dim, eps)
    for d in range(head_dim):
        buffer[d] = normalised(widen(x[d]), factor, widen(weight[d]))


@jit
def rotate_head(buffer_at: Pointer, table_at: Pointer, angles: int, half: int) -> None:
    """Turn pairs (i, i + half) of the buffer; the cosines start at element `angles` of the table.

    y[i] = x[i] c - x[i + R/2] s,   y[i + R/2] = x[i + R/2] c + x[i] s   (arXiv:2104.09864).
    """
    cosines, sines = flat(table_at, angles), flat(table_at, angles + half)
    low, high = flat(buffer_at, 0), flat(buffer_at, half)
    for i in range(half):
        x_low, x_high = low[i], high[i]
        low[i] = x_low * cosines[i] - x_high * sines[i]
        high[i] = x_high * cosines[i] + x_low * sines[i]


@jit
def store_head(buffer_at: Pointer, y_at: Pointer, start: int, head_dim: int, gain: float) -> None:
    """The head that starts at element `start` = buffer * gain, rounded once."""
    buffer, y = flat(buffer_at, 0), flat(y_at, start)
    for d in range(head_dim):
        y[d] = narrow(buffer[d] * gain, y)
