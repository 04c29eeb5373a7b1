"""One rank: its shard of the weights, its pages, and the steps it runs on them."""

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from pageray.cluster.config import EngineConfig
from pageray.cluster.head_partition import partition_heads
from pageray.cluster.memory_plan import PageLayout, blocks_for_tokens, blocks_that_fit
from pageray.cluster.step import SampleRequest, StepPlan, StepResult
from pageray.workers.graphs.backend import GraphBackend, GraphBackendFactory
from pageray.workers.graphs.cost import measure_graph_bytes
from pageray.workers.graphs.ladder import GraphLadder
from pageray.workers.graphs.runner import DecodeGraphs
from pageray.workers.models.fingerprint import fingerprint
from pageray.workers.models.llama import LlamaModel, load_model
from pageray.workers.models.spec import ModelSpec
from pageray.workers.page_pool import PagePool
from pageray.workers.ranks.cuda_budget import DeviceUse, pool_budget_bytes
from pageray.workers.ranks.device import compute_dtype, kv_dtype, pick_ops
from pageray.workers.ranks.made_up_steps import made_up_steps
from pageray.workers.ranks.messages import RankReport
from pageray.workers.ranks.progress import ProgressBoard, StepProgress
from pageray.workers.sampler import Sampler
from pageray.workers.sequence_store import SequenceStore, StoredSequence
from pageray.workers.step_inputs import build_step_inputs
from pageray.workers.step_runner import EagerRunner, StepRunner
from pageray.workers.tensor_parallel import TensorParallelGroup

logger = logging.getLogger(__name__)

DEFAULT_CPU_POOL_BYTES = 1 << 29


class Rank:
    """Call `load`, `allocate`, then `execute` for every step, in one thread."""

    def __init__(
        self,
        config: EngineConfig,
        folder: Path,
        device: torch.device,
        tp: TensorParallelGroup,
        progress: ProgressBoard,
        *,
        new_graphs: GraphBackendFactory | None = None,
    ) -> None:
        """`new_graphs`: what to capture decode steps with; None: every step is launched."""
        self._new_graphs = new_graphs
        self._config = config
        self._folder = folder
        self._device = device
        self._tp = tp
        self._progress = StepProgress(progress, tp.rank)
        self._spec = ModelSpec.from_folder(folder)
        self._dtype = compute_dtype(config, self._spec, device)
        self._kv_dtype = kv_dtype(config, self._dtype, device)
        self._shard = partition_heads(self._spec.num_heads, self._spec.num_kv_heads, tp.size)[
            tp.rank
        ]
        self._ops = pick_ops(config, device)
        self._layout = PageLayout(
            num_layers=self._spec.num_layers,
            num_kv_heads=self._shard.num_kv_heads,
            block_size=config.block_size,
            head_dim=self._spec.head_dim,
            element_bytes=self._kv_dtype.itemsize,
        )
        self._max_model_len = config.max_model_len or self._spec.max_position
        self._ladder = GraphLadder.of(config, self._max_model_len)
        self._store = SequenceStore(self._max_model_len, config.block_size)
        self._sampler = Sampler(self._ops, self._spec.eos_token_ids)
        self._model: LlamaModel | None = None
        self._pool: PagePool | None = None
        self._runner: StepRunner | None = None

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
                # On CUDA a layer has only been launched when its call returns.
                progress=self._progress if self._device.type == "cpu" else None,
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
        from pageray.kernels.cpu.warm_up import LayerShape, is_cold, warm_up

        if is_cold():
            logger.warning("Compiling the CPU kernels for this machine: about a minute, once.")
        shape = LayerShape(
            num_heads=self._shard.num_q_heads,
            num_kv_heads=self._shard.num_kv_heads,
            head_dim=self._spec.head_dim,
            block_size=self._config.block_size,
            dtype=self._dtype,
            kv_dtype=self._kv_dtype,
        )
        warm_up(self._ops, shape)

    def allocate(self, num_blocks: int) -> None:
        """Take the pool's memory, run one small step so that nothing is compiled later, and
        capture the graphs of decode steps where there are any."""
        self._take_pool(num_blocks)
        self._warm_up(num_tokens=2 * self._config.block_size)
        if self._new_graphs is not None:
            begun_s = time.monotonic()
            self._runner = self._decode_graphs(self._new_graphs()).capture_all()
            elapsed_s = time.monotonic() - begun_s
            logger.info("Captured %d CUDA graphs in %.1f s.", len(self._ladder), elapsed_s)

    def _take_pool(self, num_blocks: int) -> None:
        assert self._model is not None, "load comes before allocate"
        self._pool = PagePool.allocate(self._layout, num_blocks, self._kv_dtype, self._device)
        self._runner = EagerRunner(self._model, self._pool.tensor)

    def _decode_graphs(self, backend: GraphBackend) -> DecodeGraphs:
        assert self._model is not None, "load comes before the pool"
        assert self._pool is not None, "the pool comes before graphs"
        return DecodeGraphs(
            self._model,
            self._pool.tensor,
            ladder=self._ladder,
            table_width=blocks_for_tokens(self._max_model_len, self._config.block_size),
            backend=backend,
        )

    def execute(self, plan: StepPlan) -> StepResult:
        """Run a step; the sampled tokens are in the result on rank 0 only.

        Steps run one after the other, so a later step finds on each rank what earlier ones wrote
        there. Rank 0's answer alone does not say that the other ranks' last pages are written:
        whoever reads pages from outside asks the progress board.
        """
        self._store.apply(plan)
        self._progress.begin(plan.step_id)
        result = self._run(plan)
        if self._device.type == "cuda":
            # Only rank 0 has waited for the device, for the tokens.
            torch.cuda.current_stream(self._device).synchronize()
        self._progress.end()
        return result

    @torch.inference_mode()
    def _run(self, plan: StepPlan) -> StepResult:
        assert self._pool is not None, "allocate comes before execute"
        assert self._runner is not None, "it comes with the pool"
        if plan.copies:
            pairs = torch.tensor(plan.copies, dtype=torch.int64, device=self._device)
            self._ops.copy_blocks(self._pool.tensor, pairs)
        inputs = build_step_inputs(plan, self._store, self._config.block_size)
        logits = self._runner.run(inputs)
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
        """Give up connections and memory: another engine may start in this process."""
        self._tp.close()
        if self._pool is not None:
            self._pool.close()
        self._model = self._pool = self._runner = None

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
        """Bytes left for the pool, found by running the largest step and capturing some graphs
        on a pool of one block."""
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        self._take_pool(1)
        self._warm_up(num_tokens=self._config.max_num_batched_tokens)
        activation_bytes = torch.cuda.max_memory_allocated(self._device) - before
        graph_bytes = self._measure_graph_bytes()
        self._pool = self._runner = None
        free, total = self._free_and_total_bytes()
        use = DeviceUse(total=total, free=free, activations=activation_bytes, graphs=graph_bytes)
        return pool_budget_bytes(use, self._config.gpu_memory_utilization)

    def _measure_graph_bytes(self) -> int:
        if self._new_graphs is None:
            return 0
        graphs = self._decode_graphs(self._new_graphs())
        shapes = list(self._ladder.shapes())
        return measure_graph_bytes(graphs.capture, shapes, lambda: self._free_and_total_bytes()[0])

    def _free_and_total_bytes(self) -> tuple[int, int]:
        """Of the device, what torch's allocator only keeps for later counted as free."""
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)

    def _warm_up(self, num_tokens: int) -> None:
        for plan in made_up_steps(num_tokens, self._config.block_size, self._max_model_len):
            if plan.chunks:
                self.execute(plan)
            else:
                self._store.apply(plan)
