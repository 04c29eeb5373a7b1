import dataclasses

import pytest
import torch
from torch import Tensor

from kernel_cases import assert_near
from layer_cases import WIDTH, attention_weights, case_of, random_rows, rope_of
from pageray.kernels import reference
from pageray.kernels.ops import AttentionOptions, Ops, RaggedBatch, RopeStep


@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize("is_first", [False, True])
def test_block_equals_the_operations_one_by_one(
    ops: Ops, device: torch.device, rng: torch.Generator, is_full: bool, is_first: bool
) -> None:
    case = case_of(rng, device)
    weights, rope = attention_weights(rng, device, is_full=is_full), rope_of(case)
    x_TE = None if is_first else random_rows(rng, device)
    residual_TE = random_rows(rng, device)
    results: list[tuple[Tensor, Tensor, Tensor]] = []
    for backend in (ops, reference.OPS):
        pool, residual = case.pool.clone(), residual_TE.clone()
        batch = dataclasses.replace(case.batch)
        block = backend.pack_attention(weights)
        results.append((block(x_TE, residual, pool[:, 1], rope, batch), residual, pool))
    for actual, expected in zip(*results, strict=True):
        assert_near(actual, expected)


def test_layers_of_a_step_share_what_they_work_out(rng: torch.Generator) -> None:
    """A second layer with another window must not take the first one's plan."""
    from pageray.kernels import cpu

    cpu_device = torch.device("cpu")
    case = case_of(rng, cpu_device)
    rope, residual_TE = rope_of(case), random_rows(rng, cpu_device)
    weights = attention_weights(rng, cpu_device, is_full=False)
    windowed = dataclasses.replace(weights, options=AttentionOptions(scale=0.2, window=9))
    for layer in (weights, windowed, weights):
        fresh = dataclasses.replace(case.batch)
        expected = reference.OPS.pack_attention(layer)(
            None, residual_TE.clone(), case.pool.clone()[:, 1], rope, fresh
        )
        block = cpu.OPS.pack_attention(layer)
        y_TE = block(None, residual_TE.clone(), case.pool.clone()[:, 1], rope, case.batch)
        assert_near(y_TE, expected)
    assert len(case.batch.memo) == 4, "for each window a plan, and what the block adds to it"


@pytest.mark.parametrize("is_full", [False, True])
def test_cpu_block_of_many_rows_runs_in_blocks(rng: torch.Generator, is_full: bool) -> None:
    """Keys of one block are there before the queries of another look for them."""
    from pageray.kernels import cpu
    from pageray.kernels.cpu.jit import all_threads
    from pageray.kernels.cpu.row_blocks import WHOLE, rows_of_block

    num_tokens = 4 * 256 * all_threads() + 17
    assert rows_of_block(num_tokens, 4 * (WIDTH + 320), all_threads()) != WHOLE
    device = torch.device("cpu")
    num_blocks = -(-num_tokens // 16)
    weights = attention_weights(rng, device, is_full=is_full)
    angles = torch.outer(torch.arange(float(num_tokens)), 10.0 ** -torch.linspace(0, 4, 16))
    rope = RopeStep(
        positions_T=torch.arange(num_tokens),
        cos_sin_LD=torch.cat((angles.cos(), angles.sin()), dim=1),
        slot_mapping_T=torch.arange(num_tokens),
    )
    batch = RaggedBatch(
        query_starts_S1=torch.tensor([0, num_tokens], dtype=torch.int32),
        kv_lens_S=torch.tensor([num_tokens], dtype=torch.int32),
        block_tables_SN=torch.arange(num_blocks, dtype=torch.int32).unsqueeze(0),
        max_query_len=num_tokens,
        max_kv_len=num_tokens,
    )
    x_TE = torch.randn(num_tokens, WIDTH, generator=rng)
    residual_TE = torch.randn(num_tokens, WIDTH, generator=rng)
    results: list[tuple[Tensor, Tensor, Tensor]] = []
    for backend in (cpu.OPS, reference.OPS):
        pool, residual = torch.full((num_blocks, 2, 2, 16, 32), torch.nan), residual_TE.clone()
        block = backend.pack_attention(weights)
        y_TE = block(x_TE, residual, pool, rope, dataclasses.replace(batch))
        results.append((y_TE, residual, pool))
    for actual, expected in zip(*results, strict=True):
        assert_near(actual, expected)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_cpu_block_in_16_bits(rng: torch.Generator, low: torch.dtype) -> None:
    from pageray.kernels import cpu

    device = torch.device("cpu")
    case = case_of(rng, device, low)
    weights, rope = attention_weights(rng, device, low, is_full=True), rope_of(case)
    x_TE, residual_TE = random_rows(rng, device, low), random_rows(rng, device, low)
    pool = case.pool.clone()
    twin_residual_TE = residual_TE.clone()
    y_TE = cpu.OPS.pack_attention(weights)(x_TE, residual_TE, pool[:, 1], rope, case.batch)
    expected_TE = reference.OPS.pack_attention(weights)(
        x_TE, twin_residual_TE, case.pool[:, 1], rope, dataclasses.replace(case.batch)
    )
    assert torch.equal(residual_TE, twin_residual_TE)
    # The twin rounds after every operation.
    torch.testing.assert_close(y_TE.float(), expected_TE.float(), rtol=0.05, atol=0.05)


def test_cpu_block_refuses_what_does_not_fit(rng: torch.Generator) -> None:
    from pageray.kernels import cpu

    device = torch.device("cpu")
    case = case_of(rng, device)
    weights, rope = attention_weights(rng, device, is_full=False), rope_of(case)
    residual_TE = random_rows(rng, device)
    narrow = dataclasses.replace(weights, qkv_OE=weights.qkv_OE[:-32])
    with pytest.raises(ValueError, match="288 outputs; 6 query heads and 2 KV heads of 32"):
        cpu.OPS.pack_attention(narrow)(None, residual_TE, case.layer, rope, case.batch)
    far = dataclasses.replace(rope, slot_mapping_T=rope.slot_mapping_T + 10**6)
    with pytest.raises(ValueError, match=r"slot_mapping\[0\] is 1000"):
        cpu.OPS.pack_attention(weights)(None, residual_TE, case.layer, far, case.batch)
    scaled = dataclasses.replace(weights, options=AttentionOptions(scale=1.0, k_scale=2.0))
    with pytest.raises(ValueError, match=r"k_scale is 2\.0"):
        cpu.OPS.pack_attention(scaled)
