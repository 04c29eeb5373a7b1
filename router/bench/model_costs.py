"""What a token of a model costs at least, from its configuration."""

from pathlib import Path

import torch

from pageray.cluster.errors import ConfigError
from pageray.router.bench.compare_bench import ModelCosts
from pageray.workers.models.spec import ModelSpec

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}


def model_costs(folder: Path, dtype_name: str) -> tuple[ModelCosts, torch.dtype, int]:
    """Costs, dtype and vocabulary size. Raises `ConfigError` for an unknown dtype."""
    if dtype_name not in _DTYPES:
        raise ConfigError(f"--dtype is {dtype_name!r}; it must be one of {', '.join(_DTYPES)}.")
    dtype = _DTYPES[dtype_name]
    spec = ModelSpec.from_folder(folder)
    published = _DTYPES[spec.dtype]
    heads = spec.num_heads + 2 * spec.num_kv_heads
    attention = spec.hidden_size * spec.head_dim * (heads + spec.num_heads)
    layer = attention + 3 * spec.hidden_size * spec.intermediate_size
    body, head = spec.num_layers * layer, spec.vocab_size * spec.hidden_size
    return (
        ModelCosts(
            # Wider numbers than those published say no more, so nobody has to read more.
            weight_bytes=float((body + head) * min(dtype.itemsize, published.itemsize)),
            decode_flop=2.0 * (body + head),
            prefill_flop=2.0 * body,
            kv_bytes_per_token=float(
                spec.num_layers * 2 * spec.num_kv_heads * spec.head_dim * dtype.itemsize
            ),
        ),
        dtype,
        spec.vocab_size,
    )
