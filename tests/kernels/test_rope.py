import pytest
import torch
from torch import Tensor

from kernel_cases import assert_near
from pageray.kernels import reference
from pageray.kernels.ops import Ops


def cos_sin_table(length: int, rotary_dim: int) -> Tensor:
    frequencies = 10_000.0 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    angles = torch.arange(length).unsqueeze(1) * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1)


@pytest.mark.parametrize("dims", [(32, 32), (64, 32), (96, 24), (80, 80)])
def test_rope_on_views_of_a_fused_projection(
    ops: Ops,
    device: torch.device,
    dtype: torch.dtype,
    rng: torch.Generator,
    dims: tuple[int, int],
) -> None:
    head_dim, rotary_dim = dims
    num_heads, num_kv_heads, num_tokens = 3, 1, 4
    qkv = torch.randn(num_tokens, 5 * head_dim, generator=rng).to(dtype).to(device)
    expected = qkv.clone()
    positions_T = torch.tensor([0, 1, 49, 7], device=device)
    table = cos_sin_table(50, rotary_dim).to(device)
    for apply_rope, rows in ((ops.apply_rope, qkv), (reference.OPS.apply_rope, expected)):
        q_THD = rows[:, : 3 * head_dim].view(num_tokens, num_heads, head_dim)
        k_TKD = rows[:, 3 * head_dim : 4 * head_dim].view(num_tokens, num_kv_heads, head_dim)
        apply_rope(q_THD, k_TKD, positions_T, table)
    # The values that follow in the same rows are untouched: the whole rows are compared.
    assert_near(qkv, expected)


def test_reference_turns_pairs_as_complex_numbers(rng: torch.Generator) -> None:
    q_THD, k_TKD = torch.randn(5, 2, 16, generator=rng), torch.randn(5, 1, 16, generator=rng)
    positions_T = torch.tensor([0, 3, 9, 2, 5])
    table = cos_sin_table(10, 16)
    turn = torch.complex(table[:, :8], table[:, 8:])[positions_T].unsqueeze(1)
    expected = [torch.complex(x[..., :8], x[..., 8:]) * turn for x in (q_THD, k_TKD)]
    reference.OPS.apply_rope(q_THD, k_TKD, positions_T, table)
    for x, turned in zip((q_THD, k_TKD), expected, strict=True):
        torch.testing.assert_close(x, torch.cat((turned.real, turned.imag), dim=-1))


def test_scores_depend_on_distance_only(
    ops: Ops, device: torch.device, rng: torch.Generator
) -> None:
    table = cos_sin_table(100, 32).to(device)
    row = torch.randn(1, 1, 32, generator=rng).to(device)
    scores: list[Tensor] = []
    for shift in (0, 40):
        q_THD, k_TKD = row.repeat(2, 1, 1), row.repeat(2, 1, 1)
        ops.apply_rope(q_THD, k_TKD, torch.tensor([3, 17], device=device) + shift, table)
        scores.append((q_THD[1] * k_TKD[0]).sum())
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-4, atol=1e-4)


def test_a_position_past_the_table_is_refused() -> None:
    from pageray.kernels import cpu

    x = torch.zeros(1, 1, 8)
    with pytest.raises(ValueError, match=r"positions\[0\] is 10; it must be in 0 .. 9"):
        cpu.OPS.apply_rope(x, x.clone(), torch.tensor([10]), cos_sin_table(10, 8))
