"""One rank: its shard of the weights, its pages, and the steps it runs on them."""

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from pageray.cluster.config import EngineConfig
from pageray.cluster.errors import ConfigError
from pageray.cluster.head_partition import partition_heads
from pageray.cluster.ids import NULL_BLOCK, SequenceId
from pageray.cluster.memory_plan import PageLayout, blocks_for_tokens, blocks_that_fit
from pageray.cluster.sampling_params import SamplingParams
from pageray.cluster.step import NewSequence, SampleRequest, ScheduledChunk, StepPlan, StepResult
from pageray.kernels.dispatch import default_ops
from pageray.kernels.ops import Ops
from pageray.workers.models.fingerprint import fingerprint
from pageray.workers.models.llama import LlamaModel, load_model
from pageray.workers.models.spec import ModelSpec
from pageray.workers.page_pool import PagePool
from pageray.workers.ranks.messages import RankReport
from pageray.workers.ranks.progress import ProgressBoard
from pageray.workers.sampler import Sampler
from pageray.workers.sequence_store import SequenceStore, StoredSequence
from pageray.workers.step_inputs import build_step_inputs
from pageray.workers.tensor_parallel import TensorParallelGroup

logger = logging.getLogger(__name__)

DEFAULT_CPU_POOL_BYTES = 1 << 29
CUDA_RESERVE_BYTES = 512 << 20
"""Left free on a CUDA device beside what the profile step needed: allocator slack, NCCL."""


class Rank:
    """Call `load`, `allocate`, then `execute` for every step, in one thread."""

    def __init__(
        self,
        config: EngineConfig,
        folder: Path,
        device: torch.device,
        tp: TensorParallelGroup,
        progress: ProgressBoard,
    ) -> None:
        self._config = config
        self._folder = folder
        self._device = device
        self._tp = tp
        self._progress = progress
        self._step_id = 0
        self._spec = ModelSpec.from_folder(folder)
        self._dtype = compute_dtype(config, self._spec, device)
        self._kv_dtype = (
            self._dtype if config.kv_cache_dtype == "auto" else _torch_dtype(config.kv_cache_dtype)
        )
        self._shard = partition_heads(self._spec.num_heads, self._spec.num_kv_heads, tp.size)[
            tp.rank
        ]
        self._ops = _pick_ops(config, device)
        self._layout = PageLayout(
            num_layers=self._spec.num_layers,
            num_kv_heads=self._shard.num_kv_heads,
            block_size=config.block_size,
            head_dim=self._spec.head_dim,
            element_bytes=self._kv_dtype.itemsize,
        )
        self._max_model_len = config.max_model_len or self._spec.max_position
        self._store = SequenceStore(self._max_model_len, config.block_size)
        self._sampler = Sampler(self._ops, self._spec.eos_token_ids)
        self._model: LlamaModel | None = None
        self._pool: PagePool | None = None

    @property
    def pool_path(self) -> str | None:
        return None if self._pool is None else self._pool.share_path

    def load(self) -> RankReport:
        """Read this rank's weights; say what the model is and how many blocks would fit."""
        with ThreadPoolExecutor(max_workers=1) as executor:
            kernels = executor.submit(self._compile_kernels)
            self._model = load_model(
                self._folder,
                self._spec,
                shard=self._shard,
                tp=self._tp,
                ops=self._ops,
                dtype=self._dtype,
                device=self._device,
                on_layer_written=self._layers_written,
            )
            kernels.result()
        return RankReport(
            max_blocks=self._count_blocks(),
            page_bytes=self._layout.page_bytes,
            num_layers=self._layout.num_layers,
            head_dim=self._layout.head_dim,
            kv_element_bytes=self._layout.element_bytes,
            kv_heads=(self._shard.kv_start, self._shard.kv_end),
            dtype=str(self._dtype).removeprefix("torch."),
            kv_dtype=str(self._kv_dtype).removeprefix("torch."),
            model_fingerprint=fingerprint(self._folder, self._config.quantization),
            vocab_size=self._spec.vocab_size,
            max_position=self._spec.max_position,
            eos_token_ids=self._spec.eos_token_ids,
        )

    def _compile_kernels(self) -> None:
        """On CPU: load every kernel from the disk, or compile it there once per machine."""
        if self._device.type != "cpu":
            return
        from pageray.kernels.cpu.warm_up import is_cold, warm_up

        if is_cold():
            logger.warning("Compiling the CPU kernels for this machine: about a minute, once.")
        warm_up(
            self._shard.num_q_heads,
            self._shard.num_kv_heads,
            self._spec.head_dim,
            self._config.block_size,
            self._kv_dtype,
        )

    def allocate(self, num_blocks: int) -> None:
        """Take the pool's memory, then run one small step so that nothing is compiled later."""
        self._pool = PagePool.allocate(self._layout, num_blocks, self._kv_dtype, self._device)
        self._warm_up(num_tokens=2 * self._config.block_size)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run a step; the sampled tokens are in the result on rank 0 only.

        Steps run one after the other, so a later step finds on each rank what earlier ones wrote
        there. Rank 0's answer alone does not say that the other ranks' last pages are written:
        whoever reads pages from outside asks the progress board.
        """
        self._store.apply(plan)
        self._step_id = plan.step_id
        result = self._run(plan)
        if self._device.type == "cuda":
            # Only rank 0 has waited for the device, for the tokens.
            torch.cuda.current_stream(self._device).synchronize()
        self._progress.step_written(self._tp.rank, plan.step_id)
        return result

    def _layers_written(self, num_layers: int) -> None:
        # On CUDA the layer has only been launched.
        if self._device.type == "cpu":
            self._progress.layers_written(self._tp.rank, self._step_id, num_layers)

    @torch.inference_mode()
    def _run(self, plan: StepPlan) -> StepResult:
        assert self._model is not None, "load comes before execute"
        assert self._pool is not None, "allocate comes before execute"
        pool = self._pool.tensor
        if plan.copies:
            pairs = torch.tensor(plan.copies, dtype=torch.int64, device=self._device)
            self._ops.copy_blocks(pool, pairs)
        inputs = build_step_inputs(plan, self._store, self._config.block_size, self._device)
        logits = self._model.forward(
            inputs.token_ids_T,
            inputs.positions_T,
            pool,
            inputs.slot_mapping_T,
            inputs.batch,
            inputs.logit_rows_R,
        )
        if logits is None or not plan.samples:
            return StepResult(step_id=plan.step_id)
        if inputs.sample_rows != tuple(range(len(logits))):
            logits = logits[list(inputs.sample_rows)]
        sequences = [self._stored(sample) for sample in plan.samples]
        token_ids, logprobs = self._sampler.sample(logits, sequences, self._store)
        has_logprobs = any(entry is not None for entry in logprobs)
        return StepResult(
            step_id=plan.step_id,
            token_ids=tuple(token_ids),
            logprobs=tuple(logprobs) if has_logprobs else (),
        )

    def _stored(self, sample: SampleRequest) -> StoredSequence:
        return self._store[sample.sequence_id]

    def close(self) -> None:
        self._tp.close()
        if self._pool is not None:
            self._pool.close()

    def _count_blocks(self) -> int:
        if self._config.num_gpu_blocks_override is not None:
            return self._config.num_gpu_blocks_override
        budget = self._config.kv_cache_memory_bytes
        if budget is None:
            budget = (
                self._profile_cuda_bytes()
                if self._device.type == "cuda"
                else DEFAULT_CPU_POOL_BYTES
            )
        return blocks_that_fit(budget, self._layout)

    def _profile_cuda_bytes(self) -> int:
        """Bytes left for the pool: the share of the device we may use, less what is taken and
        what the largest step needs on top, found by running one."""
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        self._pool = PagePool.allocate(self._layout, 1, self._kv_dtype, self._device)
        self._warm_up(num_tokens=self._config.max_num_batched_tokens)
        self._pool = None
        activation_bytes = torch.cuda.max_memory_allocated(self._device) - before
        free, total = torch.cuda.mem_get_info(self._device)
        allowed = int(total * self._config.gpu_memory_utilization)
        budget = allowed - (total - free) - activation_bytes - CUDA_RESERVE_BYTES
        if budget <= 0:
            raise ConfigError(
                f"After weights and activations nothing is left for the KV pool: the device has "
                f"{total:,} bytes, gpu_memory_utilization allows {allowed:,}, {total - free:,} are "
                f"taken and a step needs {activation_bytes:,}."
            )
        return budget

    def _warm_up(self, num_tokens: int) -> None:
        """One prefill of about `num_tokens`, then one decode, of made-up sequences.

        All their tokens share the null block's slots, which nobody else reads.
        """
        length = max(1, min(self._config.block_size, self._max_model_len - 1))
        ids = [SequenceId(-1 - number) for number in range(max(1, num_tokens // length))]
        sampling = SamplingParams(top_p=0.5, top_k=2, repetition_penalty=1.1)
        num_blocks = blocks_for_tokens(length + 1, self._config.block_size)
        added = tuple(
            NewSequence(
                sequence_id=sequence_id,
                index=0,
                seed=0,
                token_ids=(0,) * (length + 1),
                num_prompt_tokens=length,
                block_ids=(NULL_BLOCK,) * num_blocks,
                sampling=sampling,
            )
            for sequence_id in ids
        )
        prefill = tuple(ScheduledChunk(sequence_id, 0, length) for sequence_id in ids)
        self.execute(StepPlan(step_id=0, added=added, chunks=prefill))
        decode = tuple(ScheduledChunk(sequence_id, length, 1) for sequence_id in ids)
        samples = tuple(SampleRequest(sequence_id, row) for row, sequence_id in enumerate(ids))
        self.execute(StepPlan(step_id=0, dropped=(), chunks=decode, samples=samples))
        self._store.apply(StepPlan(step_id=0, dropped=tuple(ids)))


def pick_device(config: EngineConfig, index: int) -> torch.device:
    """Raises `ConfigError` when CUDA is asked for and not there."""
    if config.device == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", index)
    if config.device == "cuda":
        raise ConfigError("device is 'cuda', but torch sees no CUDA device; use device: cpu.")
    return torch.device("cpu")


def _pick_ops(config: EngineConfig, device: torch.device) -> Ops:
    """Raises `ConfigError` when the weights cannot be kept on this device as configured."""
    try:
        return default_ops(device, config.quantization)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def compute_dtype(config: EngineConfig, spec: ModelSpec, device: torch.device) -> torch.dtype:
    """The dtype to compute in: as configured, or the model's own if the device is good at it."""
    if config.dtype != "auto":
        return _torch_dtype(config.dtype)
    own = _torch_dtype(spec.dtype)
    if device.type == "cpu" and not has_fast_low_precision(own):
        return torch.float32
    return own


def has_fast_low_precision(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies matrices of `dtype` with its own instructions.

    Without them oneDNN falls back to loops several times slower than float32.
    """
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float32


def _torch_dtype(name: str) -> torch.dtype:
    return {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
    }[name]
