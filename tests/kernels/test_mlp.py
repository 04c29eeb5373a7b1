import pytest
import torch

from kernel_cases import assert_near
from layer_cases import mlp_weights
from pageray.kernels import reference
from pageray.kernels.ops import MlpWeights, Ops

# On both sides of half a panel (4, 8 or 16 hidden units) and of a tile's rows (6 or 14).
HIDDEN = (1, 8, 37)
NUM_TOKENS = (0, 1, 9, 31)


@pytest.mark.parametrize("num_hidden", HIDDEN)
@pytest.mark.parametrize("has_bias", [False, True])
def test_mlp_equals_the_operations_one_by_one(
    ops: Ops, device: torch.device, rng: torch.Generator, num_hidden: int, has_bias: bool
) -> None:
    weights = mlp_weights(num_hidden, 24, generator=rng, device=device, has_bias=has_bias)
    mlp, twin = ops.pack_mlp(weights), reference.OPS.pack_mlp(weights)
    for num_tokens in NUM_TOKENS:
        x_TE = torch.randn(num_tokens, 24, generator=rng).to(device)
        residual_TE = torch.randn(num_tokens, 24, generator=rng).to(device)
        twin_residual_TE = residual_TE.clone()
        assert_near(mlp(x_TE, residual_TE), twin(x_TE, twin_residual_TE))
        assert_near(residual_TE, twin_residual_TE)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_cpu_mlp_rounds_at_the_end_only(rng: torch.Generator, low: torch.dtype) -> None:
    from pageray.kernels import cpu

    weights = mlp_weights(32, 24, generator=rng, dtype=low)
    exact = MlpWeights(
        norm_E=weights.norm_E.double(),
        eps=weights.eps,
        gate_up_2IE=weights.gate_up_2IE.double(),
        gate_up_bias_2I=None,
        down_EI=weights.down_EI.double(),
        down_bias_E=None,
    )
    x_TE = torch.randn(5, 24, generator=rng).to(low)
    residual_TE = torch.randn(5, 24, generator=rng).to(low)
    sum_TE = residual_TE + x_TE
    y_TE = cpu.OPS.pack_mlp(weights)(x_TE, residual_TE)
    assert y_TE.dtype is low
    assert torch.equal(residual_TE, sum_TE)
    zero_TE = torch.zeros(5, 24, dtype=torch.float64)
    assert_near(y_TE, reference.OPS.pack_mlp(exact)(zero_TE, sum_TE.double()).to(low))


def test_cpu_mlp_of_a_wide_layer_runs_on_all_threads(rng: torch.Generator) -> None:
    """Large enough for several threads, blocks of rows and units of panels."""
    from pageray.kernels import cpu

    weights = mlp_weights(700, 1000, generator=rng)
    x_TE = torch.randn(150, 1000, generator=rng)
    mlp, twin = cpu.OPS.pack_mlp(weights), reference.OPS.pack_mlp(weights)
    y_TE, expected_TE = mlp(x_TE, x_TE.clone()), twin(x_TE, x_TE.clone())
    scale = expected_TE.abs().amax()
    assert_near(y_TE / scale, expected_TE / scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cpu_mlp_of_many_rows_runs_in_blocks(rng: torch.Generator, dtype: torch.dtype) -> None:
    """Their rows are those of few, in the last block too."""
    from pageray.kernels import cpu
    from pageray.kernels.cpu.jit import all_threads
    from pageray.kernels.cpu.row_blocks import WHOLE, rows_of_block

    num_rows = 4 * 256 * all_threads() + 17
    assert rows_of_block(num_rows, 1000, all_threads()) != WHOLE
    mlp = cpu.OPS.pack_mlp(mlp_weights(32, 32, generator=rng, dtype=dtype))
    x_TE = torch.randn(num_rows, 32, generator=rng).to(dtype)
    residual_TE = torch.randn(num_rows, 32, generator=rng).to(dtype)
    expected_residual_TE = residual_TE.clone()
    parts = [
        mlp(x_TE[start : start + 100], expected_residual_TE[start : start + 100])
        for start in range(0, num_rows, 100)
    ]
    assert_near(mlp(x_TE, residual_TE), torch.cat(parts))
    assert torch.equal(residual_TE, expected_residual_TE)


def test_int8_mlp_is_near(rng: torch.Generator) -> None:
    from pageray.kernels import cpu

    weights = mlp_weights(96, 64, generator=rng)
    x_TE = torch.randn(7, 64, generator=rng)
    y_TE = cpu.INT8_OPS.pack_mlp(weights)(x_TE, x_TE.clone())
    expected_TE = reference.OPS.pack_mlp(weights)(x_TE, x_TE.clone())
    error_TE = y_TE - expected_TE
    relative = float(error_TE.square().sum() / expected_TE.square().sum()) ** 0.5
    assert 0 < relative < 0.02


def test_cpu_mlp_refuses_what_does_not_fit(rng: torch.Generator) -> None:
    from pageray.kernels import cpu

    with pytest.raises(ValueError, match=r"\(6, 4\).*\(4, 2\)"):
        cpu.OPS.pack_mlp(
            MlpWeights(
                norm_E=torch.ones(4),
                eps=1e-5,
                gate_up_2IE=torch.zeros(6, 4),
                gate_up_bias_2I=None,
                down_EI=torch.zeros(4, 2),
                down_bias_E=None,
            )
        )
    mlp = cpu.OPS.pack_mlp(mlp_weights(4, 8, generator=rng))
    with pytest.raises(ValueError, match=r"residual has shape \(2, 7\)"):
        mlp(torch.zeros(2, 7), torch.zeros(2, 7))
    with pytest.raises(ValueError, match=r"x has shape \(3, 8\)"):
        mlp(torch.zeros(3, 8), torch.zeros(2, 8))
    with pytest.raises(ValueError, match=r"x is torch.float16 and residual torch.float32"):
        mlp(torch.zeros(2, 8, dtype=torch.float16), torch.zeros(2, 8))
    with pytest.raises(ValueError, match="must be contiguous"):
        mlp(torch.zeros(2, 8), torch.zeros(2, 16)[:, :8])
