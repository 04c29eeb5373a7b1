"""A decoder layer's blocks with random weights, and a batch for them."""

import torch
from torch import Tensor

from kernel_cases import PagedCase, PagedShape, paged_case
from pageray.kernels.ops import AttentionOptions, AttentionWeights, MlpWeights, QkNorm, RopeStep

WIDTH = 40
# Decodes, chunks and whole prompts; two decodes that share their first blocks (see below).
MIXED = ((1, 1), (15, 1), (17, 17), (97, 1), (90, 1), (33, 3))


def case_of(
    generator: torch.Generator, device: torch.device, dtype: torch.dtype = torch.float32
) -> PagedCase:
    """32 dims a head, 6 heads on 2; sequences 3 and 4 begin with the same 80 tokens."""
    case = paged_case(PagedShape(sequences=MIXED), generator=generator, dtype=dtype, device=device)
    case.batch.block_tables_SN[4, :5] = case.batch.block_tables_SN[3, :5]
    return case


def attention_weights(
    generator: torch.Generator,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    *,
    is_full: bool,
) -> AttentionWeights:
    """Plain, or with every bias, norm and option there is."""

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device=device, dtype=dtype)

    options = AttentionOptions(scale=0.2)
    if is_full:
        sinks_H = torch.randn(6, generator=generator).to(device)
        options = AttentionOptions(scale=0.2, window=50, softcap=5.0, sinks_H=sinks_H)
    return AttentionWeights(
        norm_E=random(WIDTH),
        eps=1e-5,
        qkv_OE=random(10 * 32, WIDTH) / WIDTH**0.5,
        qkv_bias_O=random(10 * 32) if is_full else None,
        qk_norm=QkNorm(q_norm_D=random(32), k_norm_D=random(32), eps=1e-6) if is_full else None,
        o_EO=random(WIDTH, 6 * 32) / 14,
        o_bias_E=random(WIDTH) if is_full else None,
        head_dim=32,
        options=options,
    )


def rope_of(case: PagedCase) -> RopeStep:
    """The slots that the batch's tables give its queries."""
    positions: list[int] = []
    slots: list[int] = []
    for table, (length, num_queries) in zip(case.batch.block_tables_SN, MIXED, strict=True):
        for position in range(length - num_queries, length):
            positions.append(position)
            slots.append(int(table[position // 16]) * 16 + position % 16)
    device = case.q_THD.device
    angles = torch.outer(torch.arange(100.0), 10.0 ** -torch.linspace(0, 4, 16))
    return RopeStep(
        positions_T=torch.tensor(positions, device=device),
        cos_sin_LD=torch.cat((angles.cos(), angles.sin()), dim=1).to(device),
        slot_mapping_T=torch.tensor(slots, device=device),
    )


def random_rows(
    generator: torch.Generator, device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    num_tokens = sum(num_queries for _, num_queries in MIXED)
    return torch.randn(num_tokens, WIDTH, generator=generator).to(device=device, dtype=dtype)


def mlp_weights(
    num_hidden: int,
    width: int,
    *,
    generator: torch.Generator,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    has_bias: bool = False,
) -> MlpWeights:
    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(device=device, dtype=dtype)

    return MlpWeights(
        norm_E=random(width),
        eps=1e-5,
        gate_up_2IE=random(2 * num_hidden, width),
        gate_up_bias_2I=random(2 * num_hidden) if has_bias else None,
        down_EI=random(width, num_hidden) / num_hidden**0.5,
        down_bias_E=random(width) if has_bias else None,
    )
