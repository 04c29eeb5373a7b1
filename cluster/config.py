"""The engine's configuration: one frozen tree, checked once, units in the names.

`EngineConfig.from_mapping` takes what a YAML file says under `engine_kwargs` (vLLM's names where
the meaning is the same). Nothing writes to a config later; what is found out at run time (how
many blocks fit, which dtype "auto" became) lives in `ResolvedEngineConfig`.
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from pageray.cluster.errors import ConfigError

Device = Literal["auto", "cpu", "cuda"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
KvDtypeName = Literal["auto", "float32", "bfloat16", "float16", "fp8"]
Quantization = Literal["none", "int8"]

CpuCollectives = Literal["shared_memory", "gloo"]

MAX_BLOCK_SIZE = 128


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one engine (one scheduler, one block pool, `tensor_parallel_size` ranks)."""

    model: str
    """A folder in Hugging Face format, a hub id, or the name of an embedded model."""
    tensor_parallel_size: int = 1
    device: Device = "auto"
    """auto: cuda where a device is visible, else cpu."""
    dtype: DtypeName = "auto"
    """auto: the model's own dtype; on a CPU without bfloat16 instructions, float32."""
    quantization: Quantization = "none"
    """int8: weights are rounded to 8 bits when they are loaded, with a scale per output. CPU only."""
    max_model_len: int | None = None
    """Longest prompt + output, in tokens. None: the model's context length."""
    max_num_seqs: int = 256
    """Most sequences in one step."""
    max_num_batched_tokens: int = 2048
    """Token budget of one step."""
    block_size: int = 16
    """Token slots in a block."""
    kv_cache_memory_bytes: int | None = None
    """Bytes of KV pool per rank. None: from gpu_memory_utilization on CUDA, 512 MiB on CPU."""
    num_gpu_blocks_override: int | None = None
    """Number of usable blocks, whatever the memory says (vLLM's name; holds for CPU too)."""
    gpu_memory_utilization: float = 0.9
    """Share of a CUDA device's memory that weights, activations and KV pool may take."""
    kv_cache_dtype: KvDtypeName = "auto"
    """auto: the dtype of the computation. fp8: e4m3, half the bytes of bfloat16; NVIDIA devices of
    compute capability 8.9 or later."""
    cpu_threads_per_rank: int | None = None
    """Compute threads of a CPU rank. None: the cores this process may use, over the ranks."""
    cpu_collectives: CpuCollectives = "shared_memory"
    """How the ranks of a CPU engine add up their parts."""
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    """False: a prompt is computed in one step, so max_num_batched_tokens >= max_model_len."""
    enforce_eager: bool = False
    """True: no CUDA graphs, the host launches every kernel of every step. CPU has none anyway."""
    cuda_graph_sizes: tuple[int, ...] | Literal["auto"] = "auto"
    """Numbers of sequences for which decode steps are captured, ascending; a step is padded up to
    the next, and one above the last is launched by the host. auto: 1, 2, 4, 8, 16, 24, ... up to
    max_num_seqs. Each costs some memory and start time."""
    seed: int = 0
    """Seeds the draws of requests that come without a seed of their own."""
    step_timeout_s: float = 300.0
    """A rank that has not answered a step for this long is taken for dead; once some steps have
    come back, for twenty times what they took, but at least 20 s."""

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> "EngineConfig":
        """Build and check a config. Raises `ConfigError` on an unknown key (naming the nearest
        valid one), a wrong type or an impossible value."""
        reject_unknown_keys(values, cls.__struct_fields__, "engine_kwargs")
        try:
            config = msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"engine_kwargs: {error}.") from error
        config.validate()
        return config

    def validate(self) -> None:
        """Raise `ConfigError` on the first impossible value."""
        positive = {
            "tensor_parallel_size": self.tensor_parallel_size,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "block_size": self.block_size,
            "max_model_len": self.max_model_len,
            "kv_cache_memory_bytes": self.kv_cache_memory_bytes,
            "num_gpu_blocks_override": self.num_gpu_blocks_override,
            "step_timeout_s": self.step_timeout_s,
            "cpu_threads_per_rank": self.cpu_threads_per_rank,
        }
        for name, value in positive.items():
            if value is not None and not value > 0:
                raise ConfigError(f"{name} is {value}; it must be positive.")
        if self.max_model_len == 1:
            raise ConfigError("max_model_len is 1: no room for a prompt and an output token.")
        if self.kv_cache_dtype == "fp8" and self.device == "cpu":
            raise ConfigError(
                "kv_cache_dtype is 'fp8' and device 'cpu', which cannot store it; use 'bfloat16'."
            )
        if self.quantization != "none" and self.device == "cuda":
            raise ConfigError(
                f"quantization is {self.quantization!r} and device 'cuda'; there it must be 'none'."
            )
        if self.block_size > MAX_BLOCK_SIZE:
            raise ConfigError(
                f"block_size is {self.block_size}; the largest supported is {MAX_BLOCK_SIZE}."
            )
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}; "
                "it must be above 0 and at most 1."
            )
        self._validate_graph_sizes()
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, below max_num_seqs "
                f"({self.max_num_seqs}): not every running sequence could get its one token. "
                "Raise the first or lower the second."
            )

    def _validate_graph_sizes(self) -> None:
        sizes = self.cuda_graph_sizes
        if sizes == "auto":
            return
        if not sizes:
            raise ConfigError("cuda_graph_sizes is empty; for no graphs set enforce_eager: true.")
        if sorted(set(sizes)) != list(sizes) or not 1 <= sizes[0] <= sizes[-1] <= self.max_num_seqs:
            raise ConfigError(
                f"cuda_graph_sizes is {list(sizes)}; it must be ascending, from 1 at least to "
                f"max_num_seqs ({self.max_num_seqs}) at most."
            )


def reject_unknown_keys(values: Iterable[str], known: Iterable[str], where: str) -> None:
    """Raise `ConfigError` for the first key that is not known, naming the nearest that is."""
    names = sorted(known)
    for key in values:
        if key not in names:
            near = difflib.get_close_matches(str(key), names, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else f" Known keys: {', '.join(names)}."
            raise ConfigError(f"{where}: unknown key {key!r}.{hint}")
