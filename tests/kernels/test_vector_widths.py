"""The CPU's loops at the register widths of other machines; LLVM splits what this one has not."""

import subprocess
import sys

import pytest

_CODE = """
import sys
import torch
import numba
from llvmlite import binding
from numba.core.dispatcher import Dispatcher

lanes, feature = int(sys.argv[1]), sys.argv[2]
# Numba has asked what the machine can do by the time it has compiled something.
numba.njit(lambda x: x)(1)
Dispatcher.enable_caching = lambda self: None
true_features = binding.get_host_cpu_features
binding.get_host_cpu_features = lambda: {feature: True}
from pageray.kernels.cpu import vectors
binding.get_host_cpu_features = true_features
assert vectors.LANES == lanes

from pageray.kernels.cpu.dot_rows import MAX_DOT_ROWS, dot_rows
from pageray.kernels.cpu.jit import jit
from pageray.kernels.cpu.memory import pointer
from pageray.kernels.cpu.tile_product import HALF_PANEL, MAX_ROWS, PANEL, tile_product
from pageray.kernels.cpu.turn_keys import turn_keys

assert (PANEL, HALF_PANEL) == (2 * lanes, lanes)


@jit
def multiply(rows, x, w, depth, out):
    tile_product(rows, x, depth, w, PANEL, depth, out, PANEL)


@jit
def dot(rows, q, k, keys, depth, out):
    dot_rows(rows, q, depth, k, keys, depth, out, keys)


rng = torch.Generator().manual_seed(1)
for dtype in (torch.float32, torch.bfloat16):
    for rows in range(1, MAX_ROWS + 1):
        x, w = torch.randn(rows, 11, generator=rng), torch.randn(11, PANEL, generator=rng).to(dtype)
        out = torch.randn(rows, PANEL, generator=rng)
        expected = out + x @ w.float()
        multiply(rows, x.data_ptr(), pointer(w), 11, out.data_ptr())
        torch.testing.assert_close(out, expected)
    for rows in range(1, MAX_DOT_ROWS + 1):
        q = torch.randn(rows, 2 * lanes, generator=rng)
        k = torch.randn(7, 2 * lanes, generator=rng).to(dtype)
        out = torch.empty(rows, 7)
        dot(rows, q.data_ptr(), pointer(k), 7, 2 * lanes, out.data_ptr())
        torch.testing.assert_close(out, q @ k.float().T)
    keys, dims = 2 * lanes + 3, lanes + 2
    k = torch.randn(keys, dims, generator=rng).to(dtype)
    out = torch.empty(dims, keys)
    turn_keys(pointer(k), 0, keys, dims, out.data_ptr(), keys)
    assert torch.equal(out, k.float().T)
"""


@pytest.mark.parametrize(("lanes", "feature"), [(4, "neon"), (16, "avx512f")])
def test_loops_are_right_at_this_width(lanes: int, feature: str) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", _CODE, str(lanes), feature],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
