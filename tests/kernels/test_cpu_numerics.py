"""What the Numba kernels are built from."""

import torch
from torch import Tensor

from pageray.kernels.cpu.jit import FAST_MATH, jit
from pageray.kernels.cpu.memory import Pointer, flat, pointer
from pageray.kernels.cpu.numerics import (
    exp_of_negative,
    from_order_key,
    narrow,
    order_key,
    tanh,
    widen,
)


@jit
def _exp_all(x_at: Pointer, y_at: Pointer, count: int) -> None:
    x, y = flat(x_at, 0), flat(y_at, 0)
    for i in range(count):
        y[i] = narrow(exp_of_negative(widen(x[i])), y)


@jit
def _tanh_all(x_at: Pointer, y_at: Pointer, count: int) -> None:
    x, y = flat(x_at, 0), flat(y_at, 0)
    for i in range(count):
        y[i] = narrow(tanh(widen(x[i])), y)


@jit
def _convert(x_at: Pointer, y_at: Pointer, count: int) -> None:
    x, y = flat(x_at, 0), flat(y_at, 0)
    for i in range(count):
        y[i] = narrow(widen(x[i]), y)


def _exp(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _exp_all(pointer(x), pointer(y), len(x))
    return y


def test_exp_is_within_a_few_ulp() -> None:
    x = -torch.linspace(0, 86.9, 20_001)
    exact = x.double().exp()
    assert ((_exp(x) - exact) / exact).abs().max() < 5e-7


def test_exp_of_the_extremes() -> None:
    y = _exp(torch.tensor([0.0, -0.0, -88.0, -1e30, -torch.inf, torch.nan]))
    assert y[:5].tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert y[5].isnan()


def test_tanh_is_close_and_bounded() -> None:
    x = torch.cat((torch.linspace(-20, 20, 20_001), torch.tensor([1e30, -1e30, 0.0, torch.nan])))
    y = torch.empty_like(x)
    _tanh_all(pointer(x), pointer(y), len(x))
    assert (y[:-1] - x[:-1].double().tanh()).abs().max() < 2e-7
    assert y[-4:-1].tolist() == [1.0, -1.0, 0.0]
    assert y[-1].isnan()


def test_every_16_bit_number_converts_as_torch_does() -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        stored = bits.view(dtype)
        wide = torch.empty(len(bits))
        _convert(pointer(stored), pointer(wide), len(bits))
        assert torch.equal(wide.nan_to_num(7.0), stored.float().nan_to_num(7.0))
        # Halfway to the next bfloat16, and one float32 to either side of it.
        for step in (0x7FFF, 0x8000, 0x8001):
            nearby = (stored.float().view(torch.int32) + step).view(torch.float32)
            narrowed = torch.empty(len(bits), dtype=dtype)
            _convert(pointer(nearby), pointer(narrowed), len(bits))
            expected = nearby.to(dtype)
            assert torch.equal(narrowed.isnan(), expected.isnan())
            assert torch.equal(narrowed.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_order_keys_order() -> None:
    @jit
    def keys(x_at: Pointer, key_at: Pointer, back_at: Pointer, count: int) -> None:
        x, key, back = flat(x_at, 0), flat(key_at, 0), flat(back_at, 0)
        for i in range(count):
            key[i] = order_key(x[i])
            back[i] = from_order_key(key[i])

    x = torch.tensor([-torch.inf, -3e38, -1.0, -1e-45, -0.0, 0.0, 1e-45, 1.0, 3e38, torch.inf])
    key, back = torch.empty(len(x), dtype=torch.int32), torch.empty_like(x)
    keys(pointer(x), pointer(key), pointer(back), len(x))
    assert (key.diff() > 0).all()
    assert torch.equal(back.view(torch.int32), x.view(torch.int32))


def test_no_flag_assumes_that_numbers_are_finite() -> None:
    assert not FAST_MATH & {"nnan", "ninf", "fast"}
