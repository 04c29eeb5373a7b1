"""Products on matrix registers and what prepares their operands."""

import subprocess
import sys

import pytest
import torch
from llvmlite import binding

from kernel_cases import assert_near
from pageray.kernels.cpu.linear import PanelLinear
from pageray.kernels.cpu.matrix_tile import HAS_MATRIX_REGISTERS
from pageray.kernels.cpu.operand import operand_of
from pageray.kernels.cpu.packed_weight import PackedWeight, pack_weight, pack_weight_int8

needs_registers = pytest.mark.skipif(
    not HAS_MATRIX_REGISTERS, reason="this processor has no matrix registers"
)


# The second is cut into slices where several tiles of rows meet a panel.
WIDTHS = (96, 1344)


def random_weight(rng: torch.Generator, dtype: torch.dtype, width: int) -> torch.Tensor:
    """[72, width] of bfloat16 numbers."""
    return (torch.randn(72, width, generator=rng) / width**0.5).bfloat16().to(dtype)


def packed(rng: torch.Generator, dtype: torch.dtype) -> PackedWeight:
    return pack_weight(random_weight(rng, dtype, 96), None)


@needs_registers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_row_is_the_same_whatever_is_beside_it(
    rng: torch.Generator, dtype: torch.dtype, width: int
) -> None:
    weight_OE = random_weight(rng, dtype, width)
    weight = pack_weight(weight_OE, None)
    assert weight.num_parts == (1 if dtype is torch.bfloat16 else 3)
    linear = PanelLinear(weight)
    x_TE = torch.randn(70, width, generator=rng).to(dtype)
    y_TO = linear(x_TE)
    assert_near(y_TO, (x_TE.double() @ weight_OE.double().T).to(dtype))
    for num_rows in (*range(35), 47, 48, 49, 63, 64, 65):
        assert torch.equal(linear(x_TE[:num_rows]), y_TO[:num_rows])
        assert torch.equal(linear(x_TE[70 - num_rows :]), y_TO[70 - num_rows :])


@needs_registers
def test_float32_is_as_exact_as_float32_arithmetic(rng: torch.Generator) -> None:
    weight_OE = torch.randn(64, 1024, generator=rng).bfloat16().float()
    x_TE = torch.randn(20, 1024, generator=rng) * torch.logspace(-6, 6, 1024)
    exact_TO = x_TE.double() @ weight_OE.double().T
    sizes_TO = x_TE.double().abs() @ weight_OE.double().abs().T
    error_TO = (PanelLinear(pack_weight(weight_OE, None))(x_TE) - exact_TO).abs()
    assert (error_TO / sizes_TO).max() < 1e-6


@needs_registers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_is_multiplied_as_the_numbers_it_stands_for(
    rng: torch.Generator, dtype: torch.dtype
) -> None:
    weight_OE = torch.randn(40, 96, generator=rng).to(dtype)
    weight = pack_weight_int8(weight_OE, None)
    assert weight.num_parts > 0
    step_O = weight_OE.float().abs().amax(dim=1) / 127
    rounded_OE = (weight_OE.float() / step_O.unsqueeze(1)).round() * step_O.unsqueeze(1)
    linear = PanelLinear(weight)
    for num_rows in (0, 1, 15, 16, 17, 33, 70):
        x_TE = torch.randn(num_rows, 96, generator=rng).to(dtype)
        assert_near(linear(x_TE), (x_TE.double() @ rounded_OE.double().T).to(dtype))


@needs_registers
@pytest.mark.parametrize(
    "value", [1.0, -3.1415927, 1e-30, 3e38, 0.0, float("inf"), float("-inf"), float("nan")]
)
def test_parts_add_up(rng: torch.Generator, value: float) -> None:
    x_TE = torch.full((1, 96), value)
    parts, _ = operand_of(x_TE, packed(rng, torch.float32))
    high, middle, low = parts.float().view(3, 96)
    torch.testing.assert_close(high + (middle + low), x_TE[0], rtol=0, atol=0, equal_nan=True)


@needs_registers
def test_an_infinity_stays_one(rng: torch.Generator) -> None:
    weight = pack_weight(torch.ones(32, 32), None)
    x_TE = torch.ones(2, 32)
    x_TE[1, 3] = torch.inf
    y_TO = PanelLinear(weight)(x_TE)
    assert (y_TO[0] == 32).all()
    assert (y_TO[1] == torch.inf).all()


def test_inputs_that_fill_no_register_take_the_other_way(rng: torch.Generator) -> None:
    weight_OE = torch.randn(40, 24, generator=rng).bfloat16()
    weight = pack_weight(weight_OE, None)
    assert weight.num_parts == 0
    x_TE = torch.randn(3, 24, generator=rng).bfloat16()
    assert_near(PanelLinear(weight)(x_TE), (x_TE.double() @ weight_OE.double().T).bfloat16())


_WITHOUT_MATRIX_REGISTERS = """
import numba
import torch
from llvmlite import binding
from numba.core.dispatcher import Dispatcher

# Numba has asked what the machine can do by the time it has compiled something.
numba.njit(lambda x: x)(1)
Dispatcher.enable_caching = lambda self: None
features = {name: has for name, has in binding.get_host_cpu_features().items() if "amx" not in name}
binding.get_host_cpu_features = lambda: features
from pageray.kernels.cpu.linear import PanelLinear
from pageray.kernels.cpu.matrix_tile import HAS_MATRIX_REGISTERS
from pageray.kernels.cpu.packed_weight import pack_weight

assert not HAS_MATRIX_REGISTERS
rng = torch.Generator().manual_seed(1)
weight_OE = torch.randn(40, 96, generator=rng).bfloat16()
weight = pack_weight(weight_OE, None)
assert weight.num_parts == 1
linear = PanelLinear(weight)
for num_rows in range(20):
    x_TE = torch.randn(num_rows, 96, generator=rng).bfloat16()
    exact_TO = x_TE.double() @ weight_OE.double().T
    torch.testing.assert_close(linear(x_TE).double(), exact_TO, rtol=0.01, atol=0.01)
# With three parts, pairs in vector registers would gain nothing.
assert pack_weight(weight_OE.float(), None).num_parts == 0
"""


@pytest.mark.skipif(
    not binding.get_host_cpu_features().get("avx512bf16"), reason="no products of bfloat16 pairs"
)
def test_pairs_in_vector_registers() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", _WITHOUT_MATRIX_REGISTERS],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
