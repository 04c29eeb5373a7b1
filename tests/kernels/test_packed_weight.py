import pytest
import torch

from kernel_cases import assert_near
from pageray.kernels.cpu.linear import PanelLinear
from pageray.kernels.cpu.packed_weight import pack_weight, pack_weight_int8
from pageray.kernels.cpu.tile_product import MAX_ROWS, PANEL


def test_float32_that_fits_bfloat16_is_stored_so(rng: torch.Generator) -> None:
    weight_OE = torch.randn(5, 7, generator=rng).bfloat16().float()
    packed = pack_weight(weight_OE, None)
    assert packed.panels_PKN.dtype is torch.bfloat16
    assert torch.equal(PanelLinear(packed)(torch.eye(7)), weight_OE.T)


def test_float32_that_does_not_fit_stays(rng: torch.Generator) -> None:
    weight_OE = torch.randn(5, 7, generator=rng)
    packed = pack_weight(weight_OE, None)
    assert packed.panels_PKN.dtype is torch.float32
    assert torch.equal(PanelLinear(packed)(torch.eye(7)), weight_OE.T)


@pytest.mark.parametrize("num_outputs", [1, PANEL - 1, PANEL, PANEL + 1])
@pytest.mark.parametrize("num_inputs", [1, 4, 7])
def test_every_number_of_rows(rng: torch.Generator, num_outputs: int, num_inputs: int) -> None:
    weight_OE = torch.randn(num_outputs, num_inputs, generator=rng)
    linear = PanelLinear(pack_weight(weight_OE, None))
    for num_rows in range(2 * MAX_ROWS + 2):
        x_TE = torch.randn(num_rows, num_inputs, generator=rng)
        assert_near(linear(x_TE), x_TE @ weight_OE.T)


def test_int8_is_off_by_half_a_step_at_most(rng: torch.Generator) -> None:
    weight_OE = torch.randn(33, 50, generator=rng)
    weight_OE[3] = 0
    bias_O = torch.randn(33, generator=rng)
    y_EO = PanelLinear(pack_weight_int8(weight_OE, bias_O))(torch.eye(50))
    step_O = weight_OE.abs().amax(dim=1) / 127
    assert ((y_EO - bias_O - weight_OE.T).abs() <= step_O / 2 + 1e-6).all()


def test_a_bias_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(3,\).*needs \(2,\)"):
        pack_weight(torch.zeros(2, 4), torch.zeros(3))
