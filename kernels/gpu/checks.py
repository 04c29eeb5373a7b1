"""Checks that launchers make before memory is touched; each failure names tensor and numbers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pageray.kernels.gpu.precision import FLOAT_DTYPES, KV_DTYPES


def check_dtype(name: str, tensor: Tensor, allowed: Sequence[torch.dtype] = FLOAT_DTYPES) -> None:
    """Raise TypeError unless the dtype is one of `allowed`."""
    if tensor.dtype not in allowed:
        names = ", ".join(str(dtype) for dtype in allowed)
        raise TypeError(f"{name} has dtype {tensor.dtype}; allowed: {names}.")


def check_shape(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    """Raise ValueError unless the shape is `expected`."""
    if tensor.shape != expected:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected {expected}.")


def check_ndim(name: str, tensor: Tensor, expected: int) -> None:
    """Raise ValueError unless the tensor has `expected` dimensions."""
    if tensor.ndim != expected:
        raise ValueError(
            f"{name} has {tensor.ndim} dimensions (shape {tuple(tensor.shape)}); "
            f"expected {expected}."
        )


def check_last_dim_contiguous(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless neighbours in the last dimension are neighbours in memory."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} has strides {tensor.stride()}; the last must be 1. Call .contiguous() first."
        )


def check_contiguous(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless the tensor is contiguous."""
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; it must be "
            "contiguous. Call .contiguous() first."
        )


def check_vector(name: str, tensor: Tensor, length: int, dtype: torch.dtype) -> None:
    """Raise unless the tensor is contiguous, of shape [length] and of that dtype."""
    check_dtype(name, tensor, (dtype,))
    check_shape(name, tensor, (length,))
    check_contiguous(name, tensor)


def check_kv_layer(kv_B2KPD: Tensor) -> None:
    """Raise unless this is one layer of a pool: K and V planes of contiguous [P, D] tiles."""
    check_dtype("kv_B2KPD", kv_B2KPD, KV_DTYPES)
    if kv_B2KPD.dtype is torch.float8_e4m3fn and kv_B2KPD.device.type == "cuda":
        check_e4m3(torch.cuda.get_device_capability(kv_B2KPD.device), torch.version.hip)
    check_ndim("kv_B2KPD", kv_B2KPD, 5)
    _, planes, _, block_size, head_dim = kv_B2KPD.shape
    if planes != 2:
        raise ValueError(f"kv_B2KPD has {planes} planes in dim 1; expected 2 (K and V).")
    if not kv_B2KPD[0, 0, 0].is_contiguous():
        raise ValueError(
            f"kv_B2KPD has strides {kv_B2KPD.stride()}; its [P, D] = [{block_size}, {head_dim}] "
            f"tiles must be contiguous (strides {head_dim}, 1)."
        )


def check_e4m3(capability: tuple[int, int], hip_version: str | None) -> None:
    """Raise ValueError unless a device of this capability converts float8_e4m3fn."""
    if hip_version is not None:
        raise ValueError(
            f"A float8_e4m3fn pool needs an NVIDIA device; this one is AMD's (HIP {hip_version}), "
            "whose own 8-bit format is another (float8_e4m3fnuz). Use a 16-bit pool."
        )
    if capability < (8, 9):
        raise ValueError(
            "A float8_e4m3fn pool needs compute capability 8.9 or later; the device has "
            f"{capability[0]}.{capability[1]}. Use a 16-bit pool."
        )
