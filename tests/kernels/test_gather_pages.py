import pytest
import torch
from torch import Tensor

from pageray.kernels import reference
from pageray.kernels.gpu import gather_pages, scatter_pages

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]


def random_pool(rng: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Every bit pattern, NaN among them."""
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    random = torch.randint(0, 256, (num_bytes,), generator=rng, dtype=torch.uint8)
    return random.view(dtype).view(shape).to(DEVICE)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tile", [(16, 64), (5, 3)], ids=["16x64", "5x3"])
def test_a_part_of_some_pages_there_and_back(
    rng: torch.Generator, dtype: torch.dtype, tile: tuple[int, int]
) -> None:
    pool = random_pool(rng, (7, 4, 2, 3, *tile), dtype)
    blocks_N = torch.tensor([5, 0, 6], device=DEVICE)
    part = (slice(None), slice(1, 3), slice(None), slice(1, 3))
    staging = torch.zeros((3, 2, 2, 2, *tile), device=DEVICE).to(dtype)
    expected = staging.clone()
    gather_pages(pool[part], staging, blocks_N)
    reference.gather_pages(pool[part], expected, blocks_N)
    assert torch.equal(bits(staging), bits(expected))
    assert torch.equal(bits(staging[0]), bits(pool[5, 1:3, :, 1:3]))

    target = random_pool(rng, pool.shape, dtype)
    expected = target.clone()
    scatter_pages(staging, target[part], blocks_N.flip(0))
    reference.scatter_pages(staging, expected[part], blocks_N.flip(0))
    assert torch.equal(bits(target), bits(expected))
    assert torch.equal(bits(target[6, 1:3, :, 1:3]), bits(staging[0]))


def heads_of(rank: int, num_ranks: int, num_heads: int) -> range:
    return range(rank * num_heads // num_ranks, (rank + 1) * num_heads // num_ranks)


def move(sources: list[Tensor], targets: list[Tensor], num_heads: int) -> None:
    """The pages of one tensor-parallel group into those of another, in the opposite order."""
    num_blocks = sources[0].shape[0]
    blocks_N = torch.arange(num_blocks, device=DEVICE)
    for source_rank, source in enumerate(sources):
        held = heads_of(source_rank, len(sources), num_heads)
        for target_rank, target in enumerate(targets):
            wanted = heads_of(target_rank, len(targets), num_heads)
            first, end = max(held.start, wanted.start), min(held.stop, wanted.stop)
            if first >= end:
                continue
            sent = source[:, :, :, first - held.start : end - held.start]
            staging = torch.empty_like(sent, memory_format=torch.contiguous_format)
            gather_pages(sent, staging, blocks_N)
            landed = target[:, :, :, first - wanted.start : end - wanted.start]
            scatter_pages(staging, landed, blocks_N.flip(0))


def test_from_two_ranks_to_three_and_back(rng: torch.Generator) -> None:
    num_heads, shape = 6, (3, 2, 2)
    whole = random_pool(rng, (*shape, num_heads, 4, 8), torch.float16)
    two = [part.contiguous() for part in whole.chunk(2, dim=3)]
    three = [torch.zeros_like(whole[:, :, :, :2]).contiguous() for _ in range(3)]
    move(two, three, num_heads)
    assert torch.equal(bits(torch.cat(three, dim=3)), bits(whole.flip(0)))
    back = [torch.zeros_like(part) for part in two]
    move(three, back, num_heads)
    assert torch.equal(bits(torch.cat(back, dim=3)), bits(whole))


def test_no_pages_no_change() -> None:
    pool = torch.ones(2, 1, 2, 1, 4, 8, device=DEVICE)
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    scatter_pages(torch.zeros(0, 1, 2, 1, 4, 8, device=DEVICE), pool, none)
    assert torch.equal(pool, torch.ones_like(pool))


@pytest.mark.parametrize(
    ("staging", "error", "message"),
    [
        (torch.zeros(2, 1, 2, 1, 4, 8), ValueError, r"\(2, 1, 2, 1, 4, 8\); expected \(1, 1"),
        (torch.zeros(1, 1, 2, 1, 4, 8).half(), TypeError, "float16, the pool torch.float32"),
        (torch.zeros(1, 1, 2, 2, 4, 8)[:, :, :, :1], ValueError, "must be contiguous"),
    ],
    ids=["shape", "dtype", "strides"],
)
def test_a_staging_buffer_that_does_not_fit_is_refused(
    staging: Tensor, error: type[Exception], message: str
) -> None:
    pool = torch.zeros(3, 1, 2, 1, 4, 8, device=DEVICE)
    with pytest.raises(error, match=message):
        gather_pages(pool, staging.to(DEVICE), torch.tensor([1], device=DEVICE))


def test_tiles_that_are_no_run_of_memory_are_refused() -> None:
    pool = torch.zeros(3, 1, 2, 1, 8, 4, device=DEVICE).transpose(-1, -2)
    staging = torch.zeros(1, 1, 2, 1, 4, 8, device=DEVICE)
    with pytest.raises(ValueError, match="last 2 dimensions must be contiguous"):
        gather_pages(pool, staging, torch.tensor([1], device=DEVICE))


def test_a_pool_may_start_at_any_element(rng: torch.Generator) -> None:
    """The words of the copy are then no wider than the start allows."""
    numbers = random_pool(rng, (1 + 2 * 1 * 2 * 1 * 4 * 8,), torch.float16)
    pool = numbers[1:].view(2, 1, 2, 1, 4, 8)
    staging = torch.zeros(1, 1, 2, 1, 4, 8, device=DEVICE, dtype=torch.float16)
    gather_pages(pool, staging, torch.tensor([1], device=DEVICE))
    assert torch.equal(bits(staging[0]), bits(pool[1]))
