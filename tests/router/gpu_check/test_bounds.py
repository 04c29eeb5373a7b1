import math

import pytest
import torch

from pageray.router.bench.gpu_check.bounds import bound_of, largest_error


def test_the_error_is_relative_to_the_element_and_to_the_whole() -> None:
    expected = torch.tensor([3.0, 4.0, 0.0, 0.0], dtype=torch.float64)
    rms = 2.5
    for position, size in ((1, 4.0), (2, 0.0)):
        output = expected.float()
        output[position] += 0.5
        assert largest_error([output], [expected]) == pytest.approx(0.5 / (size + rms))


def test_the_worst_output_counts() -> None:
    exact, far = torch.ones(3), torch.ones(3) * 1.5
    assert largest_error([exact, far], [exact.double()] * 2) == pytest.approx(0.25)


def test_whole_numbers_count_by_the_share_that_differs() -> None:
    assert largest_error([torch.tensor([1, 2, 3, 4])], [torch.tensor([1, 2, 0, 4])]) == 0.25
    assert bound_of([torch.tensor([1])]) == 0.0


def test_nan_is_the_largest_error_of_all() -> None:
    nan, one = torch.tensor([math.nan, 1.0]), torch.ones(2, dtype=torch.float64)
    assert largest_error([nan], [one]) == math.inf


def test_zeros_and_nothing() -> None:
    assert largest_error([torch.zeros(2)], [torch.zeros(2, dtype=torch.float64)]) == 0.0
    assert largest_error([torch.zeros(0)], [torch.zeros(0, dtype=torch.float64)]) == 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_once_is_well_inside_the_bound(dtype: torch.dtype) -> None:
    expected = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    output = expected.to(dtype)
    assert 0 < largest_error([output], [expected]) < bound_of([output]) / 3
