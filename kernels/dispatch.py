"""The one place that picks an implementation of `Ops`."""

from typing import Literal

import torch

from pageray.kernels.ops import Ops

OpsName = Literal["reference", "cpu", "gpu"]
Quantization = Literal["none", "int8"]


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


def default_ops(device: torch.device, quantization: Quantization = "none") -> Ops:
    """The fast implementation for tensors on `device`, keeping weights as `quantization` says.
    Raises ValueError for what has none."""
    match device.type, quantization:
        case "cpu", "none":
            return ops_for("cpu")
        case "cpu", "int8":
            from pageray.kernels import cpu

            return cpu.INT8_OPS
        case "cuda", "none":
            return ops_for("gpu")
        case other:
            raise ValueError(
                f"No kernels for device type and quantization {other!r}; use 'cpu' with 'none' or "
                "'int8', 'cuda' with 'none', or take the slow ops_for('reference')."
            )
