"""K and V in a pool of another dtype than theirs: scaled, saturated, rounded as torch rounds."""

import pytest
import torch
from torch import Tensor

from pageray.kernels import reference
from pageray.kernels.ops import KvScales, Ops, RopeStep

# Ties, subnormals, overflow and NaN of both 16-bit formats.
_CORNERS_16_BIT = [1.00390625, 1.01171875, 1e-7, 65520.0, 3.4e38, torch.nan, 0.0, -0.0]
# The same of float8_e4m3fn: ties to even, a carry into the exponent, half the least subnormal.
_CORNERS_E4M3 = [
    17.0,
    19.0,
    31.9,
    2.0**-10,
    3 * 2.0**-10,
    448.0,
    465.0,
    500.0,
    torch.inf,
    torch.nan,
]


def _write(ops: Ops, values_D: Tensor, pool: Tensor, scales: KvScales) -> Tensor:
    """The pool after one token with these values as K and as V, unrotated."""
    qkv_TAD = values_D.repeat(1, 3, 1)
    step = RopeStep(
        positions_T=torch.zeros(1, dtype=torch.int64, device=pool.device),
        cos_sin_LD=torch.tensor([[1.0, 0.0]], device=pool.device),
        slot_mapping_T=torch.zeros(1, dtype=torch.int64, device=pool.device),
    )
    ops.rope_write_kv(qkv_TAD, pool, step, None, scales)
    return pool


def _pool(head_dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(1, 2, 1, 1, head_dim, device=device).to(dtype)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("pool_dtype", [torch.float16, torch.bfloat16], ids=str)
def test_values_are_cast_to_the_dtype_of_the_pool(
    ops: Ops, device: torch.device, pool_dtype: torch.dtype
) -> None:
    # Values alone: turning a NaN or an infinity, even by no angle, spoils its pair.
    values_D = torch.tensor(_CORNERS_16_BIT, device=device)
    pool = _write(ops, values_D, _pool(8, pool_dtype, device), KvScales())
    expected = values_D.to(pool_dtype)
    torch.testing.assert_close(pool[0, 1, 0, 0], expected, rtol=0, atol=0, equal_nan=True)


def test_k_and_v_are_divided_by_their_scales(
    ops: Ops, device: torch.device, dtype: torch.dtype, rng: torch.Generator
) -> None:
    values_D = torch.randn(32, generator=rng).to(dtype).to(device)
    scales = KvScales(k_scale=0.5, v_scale=4.0)
    pool = _write(ops, values_D, _pool(32, dtype, device), scales)
    assert torch.equal(pool[0, 0, 0, 0], values_D * 2)
    assert torch.equal(pool[0, 1, 0, 0], values_D / 4)


def test_8_bit_pools_saturate_and_round_as_torch_does(rng: torch.Generator) -> None:
    from pageray.kernels import gpu

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    random = torch.randn(246, generator=rng) * torch.logspace(-4, 3, 246)
    values_D = torch.cat((torch.tensor(_CORNERS_E4M3), random)).to(device)
    for scales in (KvScales(), KvScales(k_scale=0.37, v_scale=3.1)):
        pools = [
            _write(ops, values_D, _pool(256, torch.float8_e4m3fn, device), scales)
            for ops in (gpu.OPS, reference.OPS)
        ]
        stored, expected = (pool.view(torch.uint8) for pool in pools)
        assert torch.equal(stored, expected)
    plain = _write(gpu.OPS, values_D, _pool(256, torch.float8_e4m3fn, device), KvScales())
    assert (plain[0, 1, 0, 0, 5:9].float() == 448.0).all()
    assert plain[0, 1, 0, 0, 9].isnan()


def test_the_cpu_refuses_an_8_bit_pool() -> None:
    from pageray.kernels import cpu

    pool = _pool(8, torch.float8_e4m3fn, torch.device("cpu"))
    with pytest.raises(ValueError, match="float8_e4m3fn, which only a GPU can store"):
        _write(cpu.OPS, torch.zeros(8), pool, KvScales())


@pytest.mark.parametrize("scale", [0.0, -1.0, torch.inf, torch.nan])
def test_a_scale_that_cannot_divide_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match=rf"v_scale is {scale}; it must be positive"):
        KvScales(v_scale=scale)
