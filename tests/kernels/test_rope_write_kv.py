from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from kernel_cases import TOLERANCES, assert_near
from pageray.kernels import reference
from pageray.kernels.ops import KvScales, Ops, QkNorm, RopeStep
from pageray.kernels.reference.rope import apply_rope
from pageray.kernels.reference.write_kv import write_kv

NUM_BLOCKS, TABLE_LENGTH, EPS = 6, 50, 1e-6
UNSCALED = KvScales()


def cos_sin_table(length: int, rotary_dim: int) -> Tensor:
    frequencies = 10_000.0 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    angles = torch.arange(length).unsqueeze(1) * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step of one layer; its pool holds numbers already, in three layers of which one is used."""

    qkv_TAD: Tensor
    pool: Tensor
    step: RopeStep
    norm: QkNorm | None = None
    scales: KvScales = UNSCALED

    def run(self, ops: Ops, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """(q, qkv afterwards, pool afterwards), on the CPU."""
        qkv_TAD, pool = self.qkv_TAD.clone().to(device), self.pool.clone().to(device)
        step = RopeStep(**{name: x.to(device) for name, x in vars(self.step).items()})
        norm = self.norm
        if norm is not None:
            weights = norm.q_norm_D.to(device), norm.k_norm_D.to(device)
            norm = QkNorm(q_norm_D=weights[0], k_norm_D=weights[1], eps=norm.eps)
        q_THD = ops.rope_write_kv(qkv_TAD, pool[:, 1], step, norm, self.scales)
        return q_THD.cpu(), qkv_TAD.cpu(), pool.cpu()


def make_case(
    rng: torch.Generator,
    *,
    heads: tuple[int, int] = (3, 1),
    dims: tuple[int, int] = (32, 32),
    num_tokens: int = 5,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """`heads` H and K, `dims` D and R. The third token has no slot."""
    (num_heads, num_kv_heads), (head_dim, rotary_dim) = heads, dims
    shape = (NUM_BLOCKS, 3, 2, num_kv_heads, block_size, head_dim)
    slots_T = torch.randperm(NUM_BLOCKS * block_size, generator=rng)[:num_tokens]
    slots_T[2:3] = -1
    # The projection's rows are wider than its heads: they are a view, as under a gate.
    rows = torch.randn(num_tokens, num_heads + 2 * num_kv_heads + 1, head_dim, generator=rng)
    return Case(
        qkv_TAD=rows.to(dtype)[:, :-1],
        pool=torch.randn(shape, generator=rng).to(dtype),
        step=RopeStep(
            positions_T=torch.randint(0, TABLE_LENGTH, (num_tokens,), generator=rng),
            cos_sin_LD=cos_sin_table(TABLE_LENGTH, rotary_dim),
            slot_mapping_T=slots_T,
        ),
    )


def with_norm(case: Case, rng: torch.Generator) -> Case:
    weight_2D = torch.randn(2, case.qkv_TAD.shape[2], generator=rng).to(case.qkv_TAD.dtype)
    return replace(case, norm=QkNorm(q_norm_D=weight_2D[0], k_norm_D=weight_2D[1], eps=EPS))


_HEADS = [
    (32, 32, False),
    (128, 128, False),
    (64, 64, True),
    (64, 32, True),
    (96, 24, False),
    (80, 80, True),
]
"""D, R, and whether q and k are normalised."""


@pytest.mark.parametrize("head", _HEADS, ids=str)
def test_equals_the_three_steps_one_after_the_other(
    ops: Ops,
    device: torch.device,
    dtype: torch.dtype,
    rng: torch.Generator,
    head: tuple[int, int, bool],
) -> None:
    head_dim, rotary_dim, has_norm = head
    case = make_case(rng, dims=(head_dim, rotary_dim), dtype=dtype)
    case = with_norm(case, rng) if has_norm else case
    # The whole tensors are compared: what belongs to nobody stays as it was.
    for actual, expected in zip(
        case.run(ops, device), case.run(reference.OPS, torch.device("cpu")), strict=True
    ):
        assert_near(actual, expected)


@pytest.mark.parametrize("heads", [(9, 3), (1, 1), (36, 36)], ids=str)
@pytest.mark.parametrize("block_size", [1, 7])
def test_touches_its_slots_and_its_queries_only(
    ops: Ops,
    device: torch.device,
    rng: torch.Generator,
    heads: tuple[int, int],
    block_size: int,
) -> None:
    case = make_case(rng, heads=heads, block_size=block_size)
    q_THD, qkv_TAD, pool = case.run(ops, device)
    num_heads, num_kv_heads = heads
    assert torch.equal(qkv_TAD[:, num_heads:], case.qkv_TAD[:, num_heads:])
    assert torch.equal(qkv_TAD[:, :num_heads], q_THD)
    slots_T = case.step.slot_mapping_T
    kept = [int(slot) for slot in slots_T[slots_T >= 0]]
    is_written = torch.zeros(pool.shape[:-1], dtype=torch.bool)
    for slot in kept:
        is_written[slot // block_size, 1, :, :, slot % block_size] = True
    assert torch.equal((pool != case.pool).any(dim=-1), is_written)
    values_TKD = case.qkv_TAD[slots_T >= 0, num_heads + num_kv_heads :]
    for slot, value_KD in zip(kept, values_TKD, strict=True):
        assert torch.equal(pool[slot // block_size, 1, 1, :, slot % block_size], value_KD)


def test_scores_depend_on_distance_only(
    ops: Ops, device: torch.device, rng: torch.Generator
) -> None:
    row = torch.randn(1, 1, 32, generator=rng).repeat(2, 3, 1)
    scores: list[Tensor] = []
    for shift in (0, 30):
        step = RopeStep(
            positions_T=torch.tensor([3, 17]) + shift,
            cos_sin_LD=cos_sin_table(TABLE_LENGTH, 32),
            slot_mapping_T=torch.arange(2),
        )
        q_THD, _, pool = Case(qkv_TAD=row, pool=torch.zeros(1, 2, 2, 1, 2, 32), step=step).run(
            ops, device
        )
        scores.append((q_THD[1, 0] * pool[0, 1, 0, 0, 0]).sum())
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-4, atol=1e-4)


def test_at_position_0_the_norm_is_all_there_is(
    ops: Ops, device: torch.device, dtype: torch.dtype, rng: torch.Generator
) -> None:
    case = with_norm(make_case(rng, dims=(64, 64), dtype=dtype), rng)
    case = replace(case, step=replace(case.step, positions_T=torch.zeros(5, dtype=torch.int64)))
    q_THD, _, _ = case.run(ops, device)
    assert case.norm is not None
    weight_D = case.norm.q_norm_D.to(device)
    normalised = ops.rms_norm(case.qkv_TAD[:, :3].to(device), weight_D, EPS).cpu()
    # The same formula in the same order; only the sum of squares may be added up differently.
    tolerance = 2e-6 if dtype is torch.float32 else TOLERANCES[dtype]
    torch.testing.assert_close(q_THD, normalised, rtol=tolerance, atol=tolerance)


def test_reference_turns_pairs_as_complex_numbers(rng: torch.Generator) -> None:
    x_THD = torch.randn(5, 2, 16, generator=rng)
    positions_T = torch.tensor([0, 3, 9, 2, 5])
    table = cos_sin_table(10, 16)
    turn = torch.complex(table[:, :8], table[:, 8:])[positions_T].unsqueeze(1)
    turned = torch.complex(x_THD[..., :8], x_THD[..., 8:]) * turn
    apply_rope(x_THD, positions_T, table)
    torch.testing.assert_close(x_THD, torch.cat((turned.real, turned.imag), dim=-1))


def test_reference_writes_the_slots_by_hand(rng: torch.Generator) -> None:
    pool = torch.zeros(4, 2, 1, 4, 8)
    k_TKD, v_TKD = torch.randn(2, 3, 1, 8, generator=rng).unbind(dim=0)
    write_kv(k_TKD, v_TKD, pool, torch.tensor([15, -1, 0]), KvScales(k_scale=2.0))
    assert torch.equal(pool[3, 0, 0, 3], k_TKD[0, 0] / 2)
    assert torch.equal(pool[0, 1, 0, 0], v_TKD[2, 0])
    assert pool.count_nonzero() == 2 * 2 * 8


def test_threads_change_nothing(rng: torch.Generator) -> None:
    """A step over all threads writes the same bits as token by token on one."""
    from pageray.kernels import cpu

    case = with_norm(make_case(rng, heads=(8, 2), dims=(64, 64), block_size=64), rng)
    num_tokens = 300
    case = replace(
        case,
        qkv_TAD=torch.randn(num_tokens, 12, 64, generator=rng),
        step=replace(
            case.step,
            positions_T=torch.randint(0, TABLE_LENGTH, (num_tokens,), generator=rng),
            slot_mapping_T=torch.randperm(NUM_BLOCKS * 64, generator=rng)[:num_tokens],
        ),
    )
    # Many times: threads that share what they should not do so by chance.
    runs = [case.run(cpu.OPS, torch.device("cpu")) for _ in range(20)]
    alone = case.pool.clone()
    for token in range(num_tokens):
        rows = slice(token, token + 1)
        step = replace(
            case.step,
            positions_T=case.step.positions_T[rows],
            slot_mapping_T=case.step.slot_mapping_T[rows],
        )
        cpu.OPS.rope_write_kv(case.qkv_TAD[rows], alone[:, 1], step, case.norm, UNSCALED)
    for _, qkv_TAD, pool in runs:
        assert torch.equal(pool, alone)
        assert torch.equal(qkv_TAD, case.qkv_TAD)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slot_mapping_T": torch.tensor([0, 96])}, r"slot_mapping\[1\] is 96; .* -1 .. 95"),
        ({"positions_T": torch.tensor([50, 0])}, r"positions\[0\] is 50; .* 0 .. 49"),
        ({"cos_sin_LD": torch.zeros(50, 34)}, r"34 columns; .* head dim \(32\)"),
    ],
    ids=["slot", "position", "table"],
)
def test_a_step_that_does_not_fit_is_refused_before_anything_is_written(
    rng: torch.Generator, change: dict[str, Tensor], message: str
) -> None:
    from pageray.kernels import cpu

    case = make_case(rng, num_tokens=2)
    case = replace(case, step=replace(case.step, **change))
    before = case.qkv_TAD.clone(), case.pool.clone()
    with pytest.raises(ValueError, match=message):
        cpu.OPS.rope_write_kv(case.qkv_TAD, case.pool[:, 1], case.step, None, UNSCALED)
    assert torch.equal(case.qkv_TAD, before[0])
    assert torch.equal(case.pool, before[1])


def test_a_projection_without_query_heads_is_refused(
    ops: Ops, device: torch.device, rng: torch.Generator
) -> None:
    case = make_case(rng, heads=(2, 1))
    case = replace(case, qkv_TAD=case.qkv_TAD[:, :2])
    with pytest.raises(ValueError, match="2 heads; with 1 KV heads in the pool none is left"):
        case.run(ops, device)
