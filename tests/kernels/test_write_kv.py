import pytest
import torch
from torch import Tensor

from pageray.kernels import reference
from pageray.kernels.dispatch import OpsName, ops_for
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


def test_reference_scales_rounds_and_clamps(rng: torch.Generator) -> None:
    """What is stored in 8 bits, by hand: the grid has 3 bits of fraction, and 2^-9 for its least
    positive number."""
    x = torch.tensor([1.0, 1.0625, 1.1875, 448.0, 470.0, -1e9, 2.0**-10, 3 * 2.0**-10])
    k_TKD = (x * 4).view(1, 1, 8)
    pool = torch.zeros(1, 2, 1, 2, 8, dtype=torch.float8_e4m3fn)
    reference.OPS.write_kv(k_TKD, k_TKD, pool, torch.tensor([1]), k_scale=4.0, v_scale=8.0)
    expected = torch.tensor([1.0, 1.0, 1.25, 448.0, 448.0, -448.0, 0.0, 2 * 2.0**-9])
    assert torch.equal(pool[0, 0, 0, 1].float(), expected)
    assert torch.equal(pool[0, 1, 0, 1, :4].float(), torch.tensor([0.5, 0.5, 0.625, 224.0]))


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.7, 3.0)])
def test_gpu_writes_8_bits_as_the_reference_does(
    gpu_ops: Ops, gpu_device: torch.device, rng: torch.Generator, scales: tuple[float, float]
) -> None:
    """From far below the least number of the format to far above the largest. The interpreter
    truncates where a device rounds; there this tests `round_to`, which rounds beforehand."""
    slots_T = torch.arange(8, 16)
    sizes_D = torch.logspace(-4, 3, 64)
    kv_T2KD = torch.randn(8, 2, 2, 64, generator=rng) * sizes_D
    pools: list[Tensor] = []
    for ops, device in ((reference.OPS, torch.device("cpu")), (gpu_ops, gpu_device)):
        pool = torch.zeros(2, 2, 2, 16, 64, dtype=torch.float8_e4m3fn, device=device)
        k_TKD, v_TKD = kv_T2KD.to(device).unbind(dim=1)
        ops.write_kv(k_TKD, v_TKD, pool, slots_T.to(device), k_scale=scales[0], v_scale=scales[1])
        pools.append(pool.float().cpu())
    assert torch.equal(*pools)
    assert pools[0].abs().max() == 448


@pytest.mark.gpu
def test_nan_in_8_bits(gpu_ops: Ops, gpu_device: torch.device) -> None:
    """Not under the interpreter, which makes another number of it."""
    k_TKD = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0], device=gpu_device).view(1, 1, 4)
    pool = torch.zeros(1, 2, 1, 1, 4, dtype=torch.float8_e4m3fn, device=gpu_device)
    gpu_ops.write_kv(k_TKD, k_TKD, pool, torch.tensor([0], device=gpu_device))
    expected = torch.tensor([torch.nan, 448.0, -448.0, 1.0])
    torch.testing.assert_close(pool[0, 0, 0, 0].float().cpu(), expected, equal_nan=True)


def test_cpu_refuses_scales_and_8_bits() -> None:
    from pageray.kernels import cpu

    ones = torch.ones(1, 1, 8)
    pool = torch.zeros(1, 2, 1, 4, 8)
    with pytest.raises(ValueError, match=r"k_scale is 2\.0 .* on the CPU both must be 1"):
        cpu.OPS.write_kv(ones, ones, pool, torch.tensor([0]), k_scale=2.0)
    with pytest.raises(ValueError, match="must be float32, bfloat16 or float16"):
        cpu.OPS.write_kv(ones, ones, pool.to(torch.float8_e4m3fn), torch.tensor([0]))


@pytest.mark.parametrize("name", ["reference", "gpu"])
def test_a_scale_that_cannot_divide_is_refused(name: OpsName) -> None:
    ones = torch.ones(1, 1, 8)
    with pytest.raises(ValueError, match=r"v_scale is 0\.0; it must be positive"):
        ops_for(name).write_kv(
            ones, ones, torch.zeros(1, 2, 1, 4, 8), torch.tensor([0]), v_scale=0.0
        )
