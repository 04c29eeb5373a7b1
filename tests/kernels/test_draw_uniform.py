import pytest
import torch
from torch import Tensor

from pageray.kernels import reference
from pageray.kernels.cpu.draw_uniform import philox4x32 as cpu_philox4x32
from pageray.kernels.ops import Ops
from pageray.kernels.reference.draw_uniform import philox4x32 as reference_philox4x32

ONES = 0xFFFFFFFF
# Known answers published with Random123 (Salmon et al., SC 2011): counter, key, result.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
Counter = tuple[int, int, int, int]


def integers(*values: int, device: torch.device | None = None) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(
    counter: Counter, key: tuple[int, int], result: Counter
) -> None:
    assert cpu_philox4x32(counter, key) == result
    c0, c1, c2, c3 = (integers(word) for word in counter)
    words = reference_philox4x32((c0, c1, c2, c3), (integers(key[0]), integers(key[1])))
    assert tuple(int(word) for word in words) == result


def test_the_draw_is_the_top_53_bits_of_the_first_two_words(ops: Ops, device: torch.device) -> None:
    zero = integers(0, device=device)
    u_R = ops.draw_uniform(zero, zero, zero)
    assert u_R.dtype == torch.float64
    assert float(u_R) == (0x6627E8D5E169C58D >> 11) / 2**53


@pytest.mark.parametrize("sign", [1, -1])
def test_all_64_bits_of_seed_and_position_count(ops: Ops, device: torch.device, sign: int) -> None:
    seed_R = integers(sign * 0x299F31D0A4093822, 5, sign, 2**63 - 1, -(2**63), device=device)
    index_R = integers(0, 1, 2, 3, 127, device=device)
    position_R = integers(0, 2**32 + 1, 1, 2**31, 2**40, device=device)
    u_R = ops.draw_uniform(seed_R, index_R, position_R)
    assert torch.equal(u_R, reference.OPS.draw_uniform(seed_R, index_R, position_R))
    assert len(set(u_R.cpu().numpy())) == 5


def test_a_draw_depends_on_its_arguments_only(ops: Ops, device: torch.device) -> None:
    """Not on the row, not on its neighbours, not on what was drawn before."""
    together = ops.draw_uniform(
        integers(7, 8, 7, 7, device=device),
        integers(0, 0, 1, 0, device=device),
        integers(3, 3, 3, 4, device=device),
    )
    alone = ops.draw_uniform(*(integers(n, device=device) for n in (7, 0, 4)))
    assert alone[0] == together[3]
    assert len(set(together.cpu().numpy())) == 4


def test_draws_are_spread_evenly(ops: Ops, device: torch.device) -> None:
    num_draws, num_bins = 4096, 32
    position_R = torch.arange(num_draws, device=device)
    same = torch.full_like(position_R, 3)
    u_R = ops.draw_uniform(same, same, position_R)
    assert (u_R >= 0).all()
    assert (u_R < 1).all()
    counts = (u_R * num_bins).long().bincount(minlength=num_bins).double()
    expected = num_draws / num_bins
    chi_square = ((counts - expected) ** 2 / expected).sum()
    # 31 degrees of freedom: mean 31, standard deviation 7.9.
    assert chi_square < 31 + 5 * 7.9
