"""Every operation is tested as Numba and as Triton; without a GPU Triton's interpreter runs it.

The interpreter is slow, so cases for "gpu" are small and few, and it computes bfloat16 wrongly, so
that dtype is tested on a real GPU only. Where there is one, the cases for "gpu" run on it and carry
the marker of that name.
"""

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Read when triton is imported, so it has to be set before.
    os.environ["TRITON_INTERPRET"] = "1"

from pageray.kernels.dispatch import ops_for
from pageray.kernels.ops import Ops

GPU_MARKS = [pytest.mark.gpu] if torch.cuda.is_available() else []


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=GPU_MARKS)])
def ops(request: pytest.FixtureRequest) -> Ops:
    """The implementation under test."""
    return ops_for(request.param)


@pytest.fixture
def device(ops: Ops) -> torch.device:
    """Where the implementation under test wants its tensors."""
    return torch.device("cuda" if ops.name == "gpu" and torch.cuda.is_available() else "cpu")


@pytest.fixture
def gpu_ops() -> Ops:
    """The Triton kernels, for what they alone can do."""
    return ops_for("gpu")


@pytest.fixture
def gpu_device() -> torch.device:
    """Where they want their tensors."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=str)
def dtype(request: pytest.FixtureRequest, ops: Ops) -> torch.dtype:
    if ops.name == "gpu" and request.param is torch.bfloat16 and not torch.cuda.is_available():
        pytest.skip("Triton's interpreter computes bfloat16 wrongly; needs a GPU")
    return request.param


@pytest.fixture
def rng() -> torch.Generator:
    """The same numbers in every run."""
    return torch.Generator().manual_seed(20240607)
