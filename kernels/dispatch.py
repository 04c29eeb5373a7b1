"""The one place that picks an implementation of `Ops`."""

from typing import Literal

import torch

from pageray.kernels.ops import Ops

OpsName = Literal["reference", "cpu", "gpu"]


def ops_for(name: OpsName) -> Ops:
    """The implementation of that name. Only its package is imported: Numba and Triton are heavy,
    and a machine needs just one of them."""
    match name:
        case "reference":
            from pageray.kernels import reference

            return reference.OPS
        case "cpu":
            from pageray.kernels import cpu

            return cpu.OPS
        case "gpu":
            from pageray.kernels import gpu

            return gpu.OPS


def default_ops(device: torch.device) -> Ops:
    """The fast implementation for tensors on `device`. Raises ValueError for a device that has
    none."""
    match device.type:
        case "cpu":
            return ops_for("cpu")
        case "cuda":
            return ops_for("gpu")
        case other:
            raise ValueError(
                f"No kernels for device type {other!r}; use 'cpu' or 'cuda', or take the slow "
                "ops_for('reference')."
            )
