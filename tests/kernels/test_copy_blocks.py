import pytest
import torch

from pageray.kernels import reference
from pageray.kernels.ops import Ops


@pytest.mark.parametrize("record", [(2, 2, 1, 4, 8), (3,), (5, 7)])
def test_copies_whole_records_and_nothing_else(
    ops: Ops,
    device: torch.device,
    dtype: torch.dtype,
    rng: torch.Generator,
    record: tuple[int, ...],
) -> None:
    pool = torch.randn(9, *record, generator=rng).to(dtype)
    # A record's bytes count, not its numbers: a NaN is copied with its payload.
    pool[4] = torch.nan
    expected = pool.clone()
    expected[2], expected[7], expected[0] = pool[4], pool[4], pool[8]
    for copy_blocks in (ops.copy_blocks, reference.OPS.copy_blocks):
        copied = pool.clone().to(device)
        copy_blocks(copied, torch.tensor([[4, 2], [4, 7], [8, 0]], device=device))
        assert torch.equal(copied.cpu().nan_to_num(77.0), expected.nan_to_num(77.0))


def test_no_pairs_no_change(ops: Ops, device: torch.device) -> None:
    pool = torch.ones(3, 4, device=device)
    ops.copy_blocks(pool, torch.empty(0, 2, dtype=torch.int64, device=device))
    assert torch.equal(pool, torch.ones(3, 4, device=device))


def test_large_records_over_threads(rng: torch.Generator) -> None:
    from pageray.kernels import cpu

    pool = torch.randn(4, 50_001, generator=rng)
    expected = pool[[0, 3, 2, 3]].clone()
    cpu.OPS.copy_blocks(pool, torch.tensor([[3, 1]]))
    assert torch.equal(pool, expected)


def test_a_block_outside_the_pool_is_refused() -> None:
    from pageray.kernels import cpu

    with pytest.raises(ValueError, match=r"is 3; it must be in 0 .. 2"):
        cpu.OPS.copy_blocks(torch.zeros(3, 4), torch.tensor([[0, 3]]))
