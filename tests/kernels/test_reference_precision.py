"""The reference computes in float64 what it is given in float64."""

import pytest
import torch

from kernel_cases import PagedShape, paged_case
from pageray.kernels import reference
from pageray.kernels.reference.precision import widened


@pytest.mark.parametrize(
    ("given", "computed"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_widened(given: torch.dtype, computed: torch.dtype) -> None:
    assert widened(torch.ones(2, dtype=given)).dtype is computed


def test_float64_comes_out_exact_to_float64(rng: torch.Generator) -> None:
    """Values that float32 would round show in every operation that computes."""
    x = torch.randn(3, 8, dtype=torch.float64, generator=rng)
    weight = torch.randn(8, dtype=torch.float64, generator=rng)
    expected = x / x.square().mean(dim=1, keepdim=True).sqrt() * weight
    torch.testing.assert_close(
        reference.OPS.rms_norm(x, weight, 0.0), expected, rtol=1e-14, atol=0.0
    )
    gate, up = x.chunk(2, dim=1)
    torch.testing.assert_close(
        reference.OPS.silu_mul(x), gate / (1 + (-gate).exp()) * up, rtol=1e-14, atol=0.0
    )


def test_attention_of_one_key_is_its_value(rng: torch.Generator) -> None:
    case = paged_case(PagedShape(sequences=((1, 1),)), generator=rng, dtype=torch.float64)
    case.pool.copy_(torch.randn(case.pool.shape, dtype=torch.float64, generator=rng))
    out = reference.OPS.paged_attention(case.q_THD, case.layer, case.batch, case.options)
    value_KD = case.layer[int(case.batch.block_tables_SN[0, 0]), 1, :, 0]
    torch.testing.assert_close(out[0], value_KD.repeat_interleave(3, dim=0), rtol=1e-15, atol=0.0)
