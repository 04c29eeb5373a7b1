import pytest
import torch

from kernel_cases import assert_near
from pageray.kernels import reference
from pageray.kernels.ops import Ops

# On both sides of half a panel (4, 8 or 16 hidden units) and of a tile's rows (6 or 14).
HIDDEN = (1, 8, 37)
NUM_TOKENS = (0, 1, 9, 31)


@pytest.mark.parametrize("num_hidden", HIDDEN)
def test_mlp_equals_the_three_operations(
    ops: Ops, device: torch.device, rng: torch.Generator, num_hidden: int
) -> None:
    gate_up_2IE = torch.randn(2 * num_hidden, 24, generator=rng).to(device)
    gate_up_bias = torch.randn(2 * num_hidden, generator=rng).to(device)
    down_EI = (torch.randn(20, num_hidden, generator=rng) / 5).to(device)
    down_bias = torch.randn(20, generator=rng).to(device)
    for biases in ((None, None), (gate_up_bias, down_bias)):
        weights = (gate_up_2IE, biases[0], down_EI, biases[1])
        mlp, twin = ops.pack_mlp(*weights), reference.OPS.pack_mlp(*weights)
        for num_tokens in NUM_TOKENS:
            x_TE = torch.randn(num_tokens, 24, generator=rng).to(device)
            assert_near(mlp(x_TE), twin(x_TE))


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_cpu_mlp_rounds_less_than_the_three_operations(
    rng: torch.Generator, low: torch.dtype
) -> None:
    from pageray.kernels import cpu

    gate_up_2IE = torch.randn(64, 24, generator=rng).to(low)
    down_EI = (torch.randn(20, 32, generator=rng) / 5).to(low)
    x_TE = torch.randn(5, 24, generator=rng).to(low)
    exact = reference.OPS.pack_mlp(gate_up_2IE.double(), None, down_EI.double(), None)(
        x_TE.double()
    )
    y_TE = cpu.OPS.pack_mlp(gate_up_2IE, None, down_EI, None)(x_TE)
    assert y_TE.dtype is low
    assert_near(y_TE, exact.to(low))


def test_cpu_mlp_of_a_wide_layer_runs_on_all_threads(rng: torch.Generator) -> None:
    """Large enough for several threads, blocks of rows and units of panels."""
    from pageray.kernels import cpu

    weights = (
        torch.randn(2 * 700, 1000, generator=rng),
        None,
        torch.randn(130, 700, generator=rng) / 700,
        None,
    )
    x_TE = torch.randn(150, 1000, generator=rng) / 30
    assert_near(cpu.OPS.pack_mlp(*weights)(x_TE), reference.OPS.pack_mlp(*weights)(x_TE))


def test_cpu_mlp_refuses_shapes_that_do_not_fit() -> None:
    from pageray.kernels import cpu

    with pytest.raises(ValueError, match=r"\(6, 4\).*\(4, 2\)"):
        cpu.OPS.pack_mlp(torch.zeros(6, 4), None, torch.zeros(4, 2), None)
