import re

import pytest

from pageray.cluster.config import EngineConfig
from pageray.cluster.errors import ConfigError


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tensor_paralel_size": 2}, "Did you mean 'tensor_parallel_size'?"),
        ({"zzz": 2}, "Known keys: block_size"),
        ({"block_size": "16"}, "Expected `int`, got `str` - at `$.block_size`"),
        ({"block_size": 0}, "block_size is 0; it must be positive"),
        ({"block_size": 256}, "largest supported is 128"),
        ({"dtype": "int4"}, "Invalid enum value 'int4' - at `$.dtype`"),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 9}, "below max_num_seqs (9)"),
        ({"gpu_memory_utilization": 1.5}, "at most 1"),
        ({"quantization": "int8", "device": "cuda"}, "there it must be 'none'"),
        ({"kv_cache_dtype": "fp8", "device": "cpu"}, "use 'bfloat16'"),
        ({"quantization": "int4"}, "Invalid enum value 'int4' - at `$.quantization`"),
        ({"max_model_len": 1}, "no room for a prompt"),
        ({"kv_cache_memory_bytes": -1}, "kv_cache_memory_bytes is -1"),
        ({"cuda_graph_sizes": []}, "for no graphs set enforce_eager: true"),
        ({"cuda_graph_sizes": [1, 4, 2]}, "[1, 4, 2]; it must be ascending"),
        ({"cuda_graph_sizes": [1, 1]}, "must be ascending"),
        ({"cuda_graph_sizes": [0, 1]}, "from 1 at least"),
        ({"cuda_graph_sizes": [1, 9], "max_num_seqs": 8}, "max_num_seqs (8) at most"),
        ({"cuda_graph_sizes": "all"}, "Invalid enum value 'all' - at `$.cuda_graph_sizes`"),
    ],
)
def test_wrong_settings_say_what_is_wrong(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        EngineConfig.from_mapping({"model": "m", **values})


def test_model_is_required() -> None:
    with pytest.raises(ConfigError, match="`model`"):
        EngineConfig.from_mapping({})


def test_defaults_are_valid() -> None:
    assert EngineConfig.from_mapping({"model": "m"}) == EngineConfig(model="m")


def test_graph_sizes_are_a_list_in_yaml() -> None:
    config = EngineConfig.from_mapping({"model": "m", "cuda_graph_sizes": [1, 3, 256]})
    assert config.cuda_graph_sizes == (1, 3, 256)
