import pytest
import torch

from kernel_cases import assert_near
from pageray.kernels import reference
from pageray.kernels.ops import Ops


@pytest.mark.parametrize("shape", [(1, 2), (3, 130), (0, 8)])
def test_silu_mul(
    ops: Ops, device: torch.device, dtype: torch.dtype, rng: torch.Generator, shape: tuple[int, int]
) -> None:
    gate_up = (4 * torch.randn(*shape, generator=rng)).to(dtype).to(device)
    assert_near(ops.silu_mul(gate_up), reference.OPS.silu_mul(gate_up))


def test_reference_equals_the_formula_in_float64() -> None:
    gate = torch.linspace(-20, 20, 9)
    up = torch.linspace(3, -2, 9)
    expected = gate.double() / (1 + (-gate.double()).exp()) * up.double()
    y = reference.OPS.silu_mul(torch.cat((gate, up)).unsqueeze(0))
    torch.testing.assert_close(y[0], expected.float())


def test_large_gates_neither_overflow_nor_vanish(ops: Ops, device: torch.device) -> None:
    gate = torch.tensor([-1e30, -200.0, -100.0, 0.0, 100.0, 200.0, 1e30])
    gate_up = torch.cat((gate, torch.ones(7))).unsqueeze(0).to(device)
    y = ops.silu_mul(gate_up)[0].cpu()
    assert y[:2].abs().max() == 0
    assert y[3:].tolist() == [0.0, 100.0, 200.0, pytest.approx(1e30)]


def test_nan_stays_nan(ops: Ops, device: torch.device) -> None:
    gate_up = torch.tensor([[torch.nan, 1.0, 1.0, torch.nan]], device=device)
    assert ops.silu_mul(gate_up).isnan().all()


def test_an_odd_row_is_refused(ops: Ops, device: torch.device) -> None:
    with pytest.raises(ValueError, match="5"):
        ops.silu_mul(torch.zeros(2, 5, device=device))


def test_threads_change_nothing(rng: torch.Generator) -> None:
    from pageray.kernels import cpu

    gate_up = torch.randn(150, 1024, generator=rng)
    rows = torch.cat([cpu.OPS.silu_mul(gate_up[i : i + 1]) for i in range(len(gate_up))])
    assert torch.equal(cpu.OPS.silu_mul(gate_up), rows)
