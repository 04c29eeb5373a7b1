import pytest
import torch

from kernel_cases import assert_near
from pageray.kernels import reference
from pageray.kernels.ops import Ops


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 33])
def test_linear_equals_a_float64_product(
    ops: Ops,
    device: torch.device,
    dtype: torch.dtype,
    rng: torch.Generator,
    num_tokens: int,
) -> None:
    weight_OE = (torch.randn(40, 24, generator=rng) / 5).to(dtype)
    bias_O = torch.randn(40, generator=rng).to(dtype)
    x_TE = torch.randn(num_tokens, 24, generator=rng).to(dtype)
    product = x_TE.double() @ weight_OE.double().T
    with_bias = product + bias_O.double()
    for implementation in (ops, reference.OPS):
        linear = implementation.pack_linear(weight_OE.to(device), None)
        assert_near(linear(x_TE.to(device)).cpu(), product.to(dtype))
        linear = implementation.pack_linear(weight_OE.to(device), bias_O.to(device))
        assert_near(linear(x_TE.to(device)).cpu(), with_bias.to(dtype))


def test_linear_takes_rows_of_a_wider_tensor(
    ops: Ops, device: torch.device, rng: torch.Generator
) -> None:
    weight_OE = torch.randn(8, 16, generator=rng).to(device)
    x = torch.randn(5, 48, generator=rng).to(device)[:, 16:32]
    expected = x @ weight_OE.T
    assert_near(ops.pack_linear(weight_OE, None)(x), expected)


def test_a_row_of_the_wrong_width_is_refused() -> None:
    from pageray.kernels import cpu

    linear = cpu.OPS.pack_linear(torch.zeros(8, 16), None)
    with pytest.raises(ValueError, match="must be 16"):
        linear(torch.zeros(2, 15))
