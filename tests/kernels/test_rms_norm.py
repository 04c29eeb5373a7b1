import pytest
import torch
from torch.nn import functional

from kernel_cases import assert_near
from pageray.kernels import reference
from pageray.kernels.ops import Ops

EPS = 1e-5


@pytest.mark.parametrize("shape", [(1, 8), (5, 576), (3, 4, 64), (0, 16)])
def test_rms_norm(
    ops: Ops, device: torch.device, dtype: torch.dtype, rng: torch.Generator, shape: tuple[int, ...]
) -> None:
    x = torch.randn(*shape, generator=rng).to(dtype).to(device)
    weight = torch.randn(shape[-1], generator=rng).to(dtype).to(device)
    before = x.clone()
    y = ops.rms_norm(x, weight, EPS)
    assert y.dtype == dtype
    assert_near(y, reference.OPS.rms_norm(x, weight, EPS))
    assert torch.equal(x, before)


def test_reference_equals_torch(rng: torch.Generator) -> None:
    x, weight = torch.randn(7, 33, generator=rng), torch.randn(33, generator=rng)
    expected = functional.rms_norm(x, (33,), weight, EPS)
    torch.testing.assert_close(reference.OPS.rms_norm(x, weight, EPS), expected)


def test_rms_norm_of_heads_inside_a_wider_row(
    ops: Ops, device: torch.device, rng: torch.Generator
) -> None:
    """q and k norms see views into the fused projection's output."""
    qkv = torch.randn(6, 5 * 32, generator=rng).to(device)
    x_THD = qkv[:, 32:96].view(6, 2, 32)
    weight = torch.randn(32, generator=rng).to(device)
    assert_near(ops.rms_norm(x_THD, weight, EPS), reference.OPS.rms_norm(x_THD, weight, EPS))


def test_add_rms_norm_updates_the_residual(
    ops: Ops, device: torch.device, dtype: torch.dtype, rng: torch.Generator
) -> None:
    x = torch.randn(5, 96, generator=rng).to(dtype).to(device)
    residual = torch.randn(5, 96, generator=rng).to(dtype).to(device)
    weight = torch.randn(96, generator=rng).to(dtype).to(device)
    expected_residual = residual.clone()
    expected = reference.OPS.add_rms_norm(x, expected_residual, weight, EPS)
    assert_near(ops.add_rms_norm(x, residual, weight, EPS), expected)
    assert torch.equal(residual, expected_residual)


def test_a_nan_spoils_its_own_row_only(
    ops: Ops, device: torch.device, rng: torch.Generator
) -> None:
    x = torch.randn(3, 16, generator=rng)
    x[1, 5] = torch.nan
    y = ops.rms_norm(x.to(device), torch.ones(16, device=device), EPS)
    assert y.isnan().any(dim=1).tolist() == [False, True, False]


def test_a_weight_of_another_width_is_refused(ops: Ops, device: torch.device) -> None:
    with pytest.raises(ValueError, match="16"):
        ops.rms_norm(torch.zeros(2, 16, device=device), torch.ones(15, device=device), EPS)


def test_threads_change_nothing(rng: torch.Generator) -> None:
    from pageray.kernels import cpu

    x, weight = torch.randn(200, 512, generator=rng), torch.randn(512, generator=rng)
    whole = cpu.OPS.rms_norm(x, weight, EPS)
    rows = torch.cat([cpu.OPS.rms_norm(x[i : i + 1], weight, EPS) for i in range(len(x))])
    assert torch.equal(whole, rows)
