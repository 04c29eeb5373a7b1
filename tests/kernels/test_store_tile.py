"""From sums to rows of y: scale, bias, gate and rounding, in each dtype that is stored."""

import pytest
import torch
from torch import Tensor

from pageray.kernels.cpu.jit import jit
from pageray.kernels.cpu.memory import Pointer, pointer
from pageray.kernels.cpu.store_tile import store_gated_rows, store_rows
from pageray.kernels.cpu.tile_product import HALF_PANEL, PANEL

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@jit
def _store(
    is_gated: bool, rows: int, sums: tuple[int, int, int], y_at: Pointer, stride: int
) -> None:
    if is_gated:
        store_gated_rows(rows, sums[0], sums[1], sums[2], y_at, 1, stride)
    else:
        store_rows(rows, sums[0], sums[1], sums[2], y_at, 1, stride)


def stored(tile: Tensor, scale: Tensor, bias: Tensor, dtype: torch.dtype, *, gated: bool) -> Tensor:
    """What is stored, from element 1 on, in rows of PANEL + 3; nothing else may change."""
    num_rows, stride = len(tile), PANEL + 3
    y = torch.full((num_rows * stride + 1,), 7.0).to(dtype)
    addresses = (tile.data_ptr(), scale.data_ptr(), bias.data_ptr())
    _store(gated, num_rows, addresses, pointer(y), stride)
    width = HALF_PANEL if gated else PANEL
    rows = y[1:].view(num_rows, stride)
    assert (rows[:, width:] == 7).all()
    assert y[0] == 7
    return rows[:, :width]


@pytest.mark.parametrize("dtype", DTYPES)
def test_scale_and_bias(rng: torch.Generator, dtype: torch.dtype) -> None:
    tile = torch.randn(5, PANEL, generator=rng)
    scale, bias = torch.randn(PANEL, generator=rng), torch.randn(PANEL, generator=rng)
    y = stored(tile, scale, bias, dtype, gated=False)
    exact = (tile.double() * scale.double() + bias.double()).float()
    torch.testing.assert_close(
        y, exact.to(dtype), rtol=2e-6 if dtype is torch.float32 else 0.01, atol=1e-6
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_is_that_of_torch(rng: torch.Generator, dtype: torch.dtype) -> None:
    tile = torch.randn(40, PANEL, generator=rng) * torch.logspace(-4, 4, PANEL)
    tile[0, :6] = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1.00390625])
    y = stored(tile, torch.ones(PANEL), torch.zeros(PANEL), dtype, gated=False)
    expected = tile.to(dtype)
    assert torch.equal(y.isnan(), expected.isnan())
    assert torch.equal(y.nan_to_num(), expected.nan_to_num())


def test_the_gate_is_silu(rng: torch.Generator) -> None:
    gates = torch.cat(
        (torch.linspace(-200, 200, 20 * HALF_PANEL), torch.randn(20 * HALF_PANEL, generator=rng))
    )
    gates = gates.view(-1, HALF_PANEL)
    tile = torch.cat((gates, torch.randn(gates.shape, generator=rng)), dim=1)
    y = stored(tile, torch.ones(PANEL), torch.zeros(PANEL), torch.float32, gated=True)
    gate, up = tile[:, :HALF_PANEL].double(), tile[:, HALF_PANEL:].double()
    exact = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-32)


def test_a_nan_and_an_infinity_pass_the_gate() -> None:
    tile = torch.ones(1, PANEL)
    tile[0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    tile[0, HALF_PANEL + 3] = torch.nan
    y = stored(tile, torch.ones(PANEL), torch.zeros(PANEL), torch.float32, gated=True)[0]
    assert y[0].isnan()
    assert y[1] == torch.inf
    assert y[3].isnan()
