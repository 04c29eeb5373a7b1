"""Decode steps from graphs, on the real model and a backend that replays on the CPU."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from fake_graphs import FakeGraphBackend
from model_folder import llama_config, save_small_model
from paged_forward import load_shard
from pageray.cluster.head_partition import partition_heads
from pageray.cluster.ids import BlockId, SequenceId
from pageray.cluster.sampling_params import SamplingParams
from pageray.cluster.step import NewSequence, SampleRequest, ScheduledChunk, StepPlan
from pageray.kernels.composed_blocks import Operations
from pageray.kernels.dispatch import ops_for
from pageray.kernels.ops import Ops, RaggedBatch, RopeStep
from pageray.workers.graphs.buffers import DecodeBuffers
from pageray.workers.graphs.ladder import GraphLadder, GraphShape
from pageray.workers.graphs.runner import DecodeGraphs, GraphRunner
from pageray.workers.models.llama import LlamaModel, load_model
from pageray.workers.models.spec import ModelSpec
from pageray.workers.sequence_store import SequenceStore
from pageray.workers.step_inputs import StepInputs, build_step_inputs
from pageray.workers.step_runner import EagerRunner
from pageray.workers.tensor_parallel import SingleRank

BLOCK_SIZE = 4
MAX_MODEL_LEN = 24
NUM_BLOCKS = 30
LADDER = GraphLadder(sizes=(1, 2, 4), kv_classes=(12, MAX_MODEL_LEN))
CPU = torch.device("cpu")

Lengths = dict[int, int]
"""Tokens of each sequence, the one to be computed included."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small-llama")
    save_small_model(path, llama_config())
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> LlamaModel:
    return load_shard(folder)[0]


def empty_pool(spec: ModelSpec) -> Tensor:
    """NaN, but for the null block: reading what is nobody's shows."""
    record = (spec.num_layers, 2, spec.num_kv_heads, BLOCK_SIZE, spec.head_dim)
    pool = torch.full((NUM_BLOCKS, *record), torch.nan)
    pool[0] = 0.0
    return pool


def ints(x: Tensor) -> list[int]:
    return cast("list[int]", x.tolist())


class Sequences:
    """Sequences of random tokens with shuffled blocks, and steps of them."""

    def __init__(self, lengths: Lengths) -> None:
        self.store = SequenceStore(MAX_MODEL_LEN, BLOCK_SIZE)
        generator = torch.Generator().manual_seed(3)
        blocks = ints(torch.randperm(NUM_BLOCKS - 1, generator=generator) + 1)
        width = -(-MAX_MODEL_LEN // BLOCK_SIZE)
        self.blocks = {name: blocks[i * width :][:width] for i, name in enumerate(lengths)}
        added = tuple(
            NewSequence(
                sequence_id=SequenceId(name),
                index=0,
                seed=0,
                token_ids=tuple(ints(torch.randint(0, 101, (length,), generator=generator))),
                num_prompt_tokens=length,
                block_ids=tuple(BlockId(block) for block in self.blocks[name]),
                sampling=SamplingParams(),
            )
            for name, length in lengths.items()
        )
        self.store.apply(StepPlan(step_id=1, added=added))

    def step(
        self, chunks: Sequence[tuple[int, int, int]], sampled: Sequence[int] | None = None
    ) -> StepInputs:
        """(sequence, start, number of tokens); `sampled`: positions in `chunks`, None for all."""
        rows = range(len(chunks)) if sampled is None else sampled
        plan = StepPlan(
            step_id=2,
            chunks=tuple(ScheduledChunk(SequenceId(name), *rest) for name, *rest in chunks),
            samples=tuple(SampleRequest(SequenceId(chunks[row][0]), row) for row in rows),
        )
        return build_step_inputs(plan, self.store, BLOCK_SIZE)


def runners(model: LlamaModel, pool: Tensor) -> tuple[GraphRunner, FakeGraphBackend]:
    backend = FakeGraphBackend()
    width = -(-MAX_MODEL_LEN // BLOCK_SIZE)
    graphs = DecodeGraphs(model, pool, ladder=LADDER, table_width=width, backend=backend)
    return graphs.capture_all(), backend


def test_every_batch_size_gives_the_logits_of_an_eager_step(model: LlamaModel) -> None:
    """Sizes shrink and grow, so that what a larger step left behind would show."""
    lengths = {1: 9, 2: 20, 3: 5, 4: 12}
    sequences, pool = Sequences(lengths), empty_pool(model.spec)
    eager = EagerRunner(model, pool)
    eager.run(sequences.step([(name, 0, length) for name, length in lengths.items()]))
    runner, backend = runners(model, pool)
    # The last tokens once more: writing the same KV again changes nothing.
    for names in ([1, 2, 3, 4], [2], [3, 1], [4, 3, 1], [1], [1, 3], [4, 2, 3]):
        inputs = sequences.step([(name, lengths[name] - 1, 1) for name in names])
        logits, expected = runner.run(inputs), eager.run(inputs)
        assert logits is not None
        assert expected is not None
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert backend.num_captured == 6
    assert backend.num_replays == 7


def test_only_the_rows_that_are_sampled_come_back(model: LlamaModel) -> None:
    lengths = {1: 6, 2: 7, 3: 8}
    sequences, pool = Sequences(lengths), empty_pool(model.spec)
    eager = EagerRunner(model, pool)
    eager.run(sequences.step([(name, 0, length) for name, length in lengths.items()]))
    runner, _ = runners(model, pool)
    chunks = [(name, length - 1, 1) for name, length in lengths.items()]
    for sampled in ([0, 2], [1], []):
        inputs = sequences.step(chunks, sampled)
        logits, expected = runner.run(inputs), eager.run(inputs)
        assert logits is not None
        assert expected is not None
        assert logits.shape == (len(sampled), 101)
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("chunks", "num_replays"),
    [
        ([(1, 8, 1), (2, 5, 1)], 1),
        ([(1, 8, 1), (2, 0, 6)], 0),
        ([(1, 0, 9)], 0),
        ([(1, 8, 1), (2, 0, 2)], 0),
        ([(1, 0, 1)], 1),
        ([(1, 8, 1), (2, 5, 1), (3, 0, 1), (4, 0, 1)], 1),
        ([(1, 8, 1), (2, 5, 1), (3, 0, 1), (4, 0, 1), (5, 0, 1)], 0),
    ],
)
def test_prefill_and_more_sequences_than_captured_run_eagerly(
    model: LlamaModel, chunks: list[tuple[int, int, int]], num_replays: int
) -> None:
    sequences = Sequences(dict.fromkeys(range(1, 6), 9))
    runner, backend = runners(model, empty_pool(model.spec))
    logits = runner.run(sequences.step(chunks))
    assert logits is not None
    assert len(logits) == len(chunks)
    assert backend.num_replays == num_replays


class SpiedOps:
    """The reference operations; notes which blocks and slots they were given, and where."""

    def __init__(self) -> None:
        self.read: list[set[int]] = []
        """By row of a step's last attention: the blocks it names."""
        self.slots: list[int] = []
        self.addresses: set[tuple[int, ...]] = set()
        reference = ops_for("reference")

        def paged_attention(q: Tensor, kv: Tensor, batch: RaggedBatch, *rest: object) -> Tensor:
            tables, lengths = batch.block_tables_SN, batch.kv_lens_S
            self.read = [
                set(ints(table[: -(-int(length) // BLOCK_SIZE)]))
                for table, length in zip(tables, lengths, strict=True)
            ]
            parts = (tables, lengths, batch.query_starts_S1)
            self.addresses.add(tuple(part.data_ptr() for part in parts))
            return reference.paged_attention(q, kv, batch, *rest)  # pyright: ignore[reportArgumentType]

        def rope_write_kv(qkv: Tensor, kv: Tensor, step: RopeStep, *rest: object) -> Tensor:
            self.slots = ints(step.slot_mapping_T)
            return reference.rope_write_kv(qkv, kv, step, *rest)  # pyright: ignore[reportArgumentType]

        blocks = Operations(
            pack_linear=reference.pack_linear,
            rms_norm=reference.rms_norm,
            add_rms_norm=reference.add_rms_norm,
            rope_write_kv=rope_write_kv,
            paged_attention=paged_attention,
            silu_mul=reference.silu_mul,
        )
        self.ops: Ops = dataclasses.replace(reference, pack_attention=blocks.pack_attention)


def spied_model(folder: Path, spied: SpiedOps) -> LlamaModel:
    spec = ModelSpec.from_folder(folder)
    (shard,) = partition_heads(spec.num_heads, spec.num_kv_heads, 1)
    return load_model(
        folder,
        spec,
        shard=shard,
        tp=SingleRank(),
        ops=spied.ops,
        dtype=torch.float32,
        device=CPU,
    )


def test_padding_touches_no_block_but_the_null_block(folder: Path) -> None:
    spied = SpiedOps()
    model = spied_model(folder, spied)
    sequences, pool = Sequences({1: 9, 2: 9, 3: 9, 4: 9}), empty_pool(model.spec)
    runner, _ = runners(model, pool)
    assert torch.equal(pool.nan_to_num(7.0), empty_pool(model.spec).nan_to_num(7.0))
    runner.run(sequences.step([(name, 8, 1) for name in (1, 2, 3, 4)]))
    before = pool.clone()
    runner.run(sequences.step([(name, 0, 1) for name in (4, 2, 1)]))
    assert spied.read == [{sequences.blocks[name][0]} for name in (4, 2, 1)] + [{0}]
    assert spied.slots == [sequences.blocks[name][0] * BLOCK_SIZE for name in (4, 2, 1)] + [-1]
    is_changed_BP = (pool != before) & ~(pool.isnan() & before.isnan())
    # The first slot of each of the three, which is where its only token goes.
    changed = is_changed_BP.transpose(1, 4).flatten(2).any(dim=2)
    slots = {sequences.blocks[name][0] * BLOCK_SIZE for name in (4, 2, 1)}
    assert set(ints(changed.flatten().nonzero().flatten())) == slots


def test_replays_find_their_tensors_where_the_capture_did(folder: Path) -> None:
    spied = SpiedOps()
    model = spied_model(folder, spied)
    sequences = Sequences({1: 9, 2: 9, 3: 9, 4: 9})
    runner, backend = runners(model, empty_pool(model.spec))
    captured = set(spied.addresses)
    for names in ([1], [1, 2], [3, 4, 2], [2], [1, 2, 3, 4]):
        runner.run(sequences.step([(name, 0, 1) for name in names]))
    assert backend.num_replays == 5
    assert spied.addresses == captured


def test_other_ranks_have_no_logits(model: LlamaModel) -> None:
    buffers = DecodeBuffers.allocate(1, 6, CPU)
    ladder = GraphLadder(sizes=(1,), kv_classes=(MAX_MODEL_LEN,))
    eager = EagerRunner(model, empty_pool(model.spec))
    runner = GraphRunner(eager, ladder, buffers, {GraphShape(1, MAX_MODEL_LEN): lambda: None})
    assert runner.run(Sequences({1: 5}).step([(1, 4, 1)])) is None
