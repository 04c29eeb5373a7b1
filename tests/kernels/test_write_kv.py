import pytest
import torch

from pageray.kernels import reference
from pageray.kernels.ops import Ops

NUM_BLOCKS, NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 6, 3, 2, 32


@pytest.mark.parametrize("block_size", [1, 7, 16])
def test_write_kv_touches_its_slots_only(
    ops: Ops, device: torch.device, dtype: torch.dtype, rng: torch.Generator, block_size: int
) -> None:
    shape = (NUM_BLOCKS, NUM_LAYERS, 2, NUM_KV_HEADS, block_size, HEAD_DIM)
    pool = torch.randn(*shape, generator=rng).to(dtype).to(device)
    expected = pool.clone()
    num_tokens = 5
    slots_T = torch.randperm(NUM_BLOCKS * block_size, generator=rng)[:num_tokens]
    slots_T[2] = -1
    # k and v are views into the fused projection's output.
    kv = torch.randn(num_tokens, 4 * HEAD_DIM, generator=rng).to(dtype).to(device)
    k_TKD, v_TKD = kv.view(num_tokens, 2, NUM_KV_HEADS, HEAD_DIM).unbind(dim=1)
    ops.write_kv(k_TKD, v_TKD, pool[:, 1], slots_T.to(device))
    for token in range(num_tokens):
        slot = int(slots_T[token])
        if slot >= 0:
            block, offset = divmod(slot, block_size)
            expected[block, 1, 0, :, offset] = k_TKD[token]
            expected[block, 1, 1, :, offset] = v_TKD[token]
    assert torch.equal(pool, expected)


def test_reference_writes_the_slots_by_hand(rng: torch.Generator) -> None:
    pool = torch.zeros(4, 2, 1, 4, 8)
    k_TKD, v_TKD = torch.randn(2, 3, 1, 8, generator=rng).unbind(dim=0)
    slots_T = torch.tensor([15, -1, 0])
    reference.OPS.write_kv(k_TKD, v_TKD, pool, slots_T)
    assert torch.equal(pool[3, 0, 0, 3], k_TKD[0, 0])
    assert torch.equal(pool[0, 1, 0, 0], v_TKD[2, 0])
    assert pool.count_nonzero() == 2 * 2 * 8


@pytest.mark.parametrize("pool_dtype", [torch.float16, torch.bfloat16])
def test_values_are_cast_to_the_dtype_of_the_pool(
    rng: torch.Generator, pool_dtype: torch.dtype
) -> None:
    from pageray.kernels import cpu

    k_TKD = torch.randn(3, 1, 8, generator=rng)
    # Ties, subnormals, overflow and NaN of both 16-bit formats.
    k_TKD[0, 0] = torch.tensor(
        [1.00390625, 1.01171875, 1e-7, 65520.0, 3.4e38, torch.nan, 0.0, -0.0]
    )
    pool = torch.zeros(1, 2, 1, 4, 8, dtype=pool_dtype)
    cpu.OPS.write_kv(k_TKD, k_TKD, pool, torch.arange(3))
    expected = k_TKD[:, 0].to(pool_dtype)
    torch.testing.assert_close(pool[0, 1, 0, :3], expected, rtol=0, atol=0, equal_nan=True)


def test_a_slot_outside_the_pool_is_refused_before_anything_is_written() -> None:
    from pageray.kernels import cpu

    pool = torch.zeros(2, 2, 1, 4, 8)
    ones = torch.ones(2, 1, 8)
    with pytest.raises(ValueError, match=r"slot_mapping\[1\] is 8; it must be in -1 .. 7"):
        cpu.OPS.write_kv(ones, ones, pool, torch.tensor([0, 8]))
    assert pool.count_nonzero() == 0
