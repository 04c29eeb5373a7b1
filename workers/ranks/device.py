"""Which device a rank computes on, and in which dtype."""

import torch

from pageray.cluster.config import EngineConfig
from pageray.cluster.errors import ConfigError
from pageray.kernels.dispatch import default_ops
from pageray.kernels.ops import Ops
from pageray.workers.models.spec import ModelSpec


def pick_device(config: EngineConfig, index: int) -> torch.device:
    """Raises `ConfigError` when CUDA is asked for and not there."""
    if config.device == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", index)
    if config.device == "cuda":
        raise ConfigError("device is 'cuda', but torch sees no CUDA device; use device: cpu.")
    return torch.device("cpu")


def pick_ops(config: EngineConfig, device: torch.device) -> Ops:
    """Raises `ConfigError` when the weights cannot be kept on this device as configured."""
    try:
        return default_ops(device, config.quantization)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def compute_dtype(config: EngineConfig, spec: ModelSpec, device: torch.device) -> torch.dtype:
    """The dtype to compute in: as configured, or the model's own if the device is good at it."""
    if config.dtype != "auto":
        return torch_dtype(config.dtype)
    own = torch_dtype(spec.dtype)
    if device.type == "cpu" and not has_fast_low_precision(own):
        return torch.float32
    return own


def has_fast_low_precision(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies matrices of `dtype` with its own instructions.

    Without them float32 is as fast, because weights are kept in the 16 bits they come in, and
    more exact.
    """
    if dtype is torch.bfloat16:
        from pageray.kernels.cpu.packed_weight import multiplies_bfloat16

        return multiplies_bfloat16()
    return dtype is torch.float32


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of that name in the configuration; KeyError for "auto"."""
    return {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "fp8": torch.float8_e4m3fn,
    }[name]


def kv_dtype(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What the pool stores when the computation runs in `dtype`. Raises `ConfigError` for what
    this device cannot store."""
    if config.kv_cache_dtype == "auto":
        return dtype
    if config.kv_cache_dtype == "fp8" and device.type == "cpu":
        raise ConfigError(
            "kv_cache_dtype is 'fp8', and the engine runs on a CPU, which cannot store it; use "
            "'bfloat16'."
        )
    return torch_dtype(config.kv_cache_dtype)
