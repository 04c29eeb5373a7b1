"""Soft cap, sinks and 8-bit pools, on every backend and against the formula of the contract."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from kernel_cases import PagedCase, PagedShape, assert_near, paged_case
from pageray.kernels import cpu, reference
from pageray.kernels.ops import AttentionOptions, Ops

E4M3 = torch.float8_e4m3fn
# Decodes, chunks and whole prompts in one call.
MIXED = ((1, 1), (16, 1), (17, 17), (33, 3))
# Either is enough to tell whether it was taken at the right place of the order.
FEATURES = (
    PagedShape(sequences=MIXED, softcap=0.8),
    PagedShape(sequences=MIXED, has_sinks=True),
    PagedShape(sequences=MIXED, softcap=0.8, has_sinks=True, window=6),
)


def attend(ops: Ops, case: PagedCase) -> Tensor:
    return ops.paged_attention(case.q_THD, case.layer, case.batch, case.options)


def check(ops: Ops, case: PagedCase) -> None:
    assert_near(attend(ops, case), attend(reference.OPS, case))


def with_sinks(case: PagedCase, sinks_H: Tensor) -> PagedCase:
    options = dataclasses.replace(case.options, sinks_H=sinks_H)
    return dataclasses.replace(case, options=options)


@pytest.mark.parametrize("softcap", [0.0, 0.7])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [0, 4])
def test_reference_is_the_formula(
    rng: torch.Generator, softcap: float, has_sinks: bool, window: int
) -> None:
    """The last query of one sequence, head by head, in Python's own numbers."""
    shape = PagedShape(
        sequences=((9, 1),),
        softcap=softcap,
        has_sinks=has_sinks,
        window=window,
        k_scale=1.7,
        v_scale=0.3,
    )
    case = paged_case(shape, generator=rng)
    sinks_H = case.options.sinks_H
    keys, values = case.layer[int(case.batch.block_tables_SN[0, 0])].double().unbind(dim=0)
    out = attend(reference.OPS, case)
    for head in range(6):
        total, sum_D = 0.0, torch.zeros(32, dtype=torch.double)
        for key in range(9 - window if window else 0, 9):
            s = float(case.q_THD[0, head].double() @ keys[head // 3, key])
            s *= case.options.scale * 1.7
            s = softcap * math.tanh(s / softcap) if softcap else s
            total += math.exp(s)
            sum_D += math.exp(s) * values[head // 3, key]
        total += math.exp(sinks_H[head]) if sinks_H is not None else 0.0
        assert_near(out[0, head], (0.3 * sum_D / total).float())


@pytest.mark.parametrize("shape", FEATURES)
def test_mixed_batch(
    ops: Ops, device: torch.device, dtype: torch.dtype, rng: torch.Generator, shape: PagedShape
) -> None:
    check(ops, paged_case(shape, generator=rng, dtype=dtype, device=device))


def test_a_sink_counts_once_however_keys_are_split(
    ops: Ops, device: torch.device, rng: torch.Generator
) -> None:
    shape = PagedShape(
        sequences=((1500, 1), (700, 3), (20, 1)), num_heads=3, num_kv_heads=1, has_sinks=True
    )
    case = paged_case(shape, generator=rng, device=device)
    # About as heavy as all keys together, so that a second one would show.
    sinks_H = torch.tensor([7.0, 6.0, 5.0], device=device)
    check(ops, with_sinks(case, sinks_H))


def test_sinks_far_above_and_below_the_scores(
    ops: Ops, device: torch.device, rng: torch.Generator
) -> None:
    case = paged_case(PagedShape(sequences=MIXED), generator=rng, device=device)
    sinks_H = torch.tensor([-torch.inf, -1e4, 1e4, -torch.inf, -1e4, 1e4], device=device)
    out, plain = attend(ops, with_sinks(case, sinks_H)), attend(ops, case)
    plain[:, [2, 5]] = 0
    assert_near(out, plain)


@pytest.mark.parametrize("size", [2.0**-10, 2.0**20])
def test_scores_far_below_and_above_the_cap(
    ops: Ops, device: torch.device, rng: torch.Generator, size: float
) -> None:
    shape = PagedShape(sequences=MIXED, head_dim=64, softcap=20.0)
    case = paged_case(shape, generator=rng, device=device)
    # Whole numbers and a scale of 1/8, so that products are exact: at this size rounding would
    # change the sign of some.
    case = dataclasses.replace(case, q_THD=case.q_THD.round() * size, pool=case.pool.round())
    assert attend(ops, case).isfinite().all()
    check(ops, case)


@pytest.mark.parametrize("shape", FEATURES)
def test_what_unused_memory_holds_changes_no_bit(
    ops: Ops, device: torch.device, shape: PagedShape
) -> None:
    outs: list[Tensor] = []
    for garbage in (0.0, torch.nan):
        generator = torch.Generator().manual_seed(1)
        outs.append(
            attend(ops, paged_case(shape, generator=generator, device=device, garbage=garbage))
        )
    assert torch.equal(*outs)
    assert outs[0].isfinite().all()


@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 128), (96, 16), (192, 32), (256, 64)])
def test_features_at_every_size(
    ops: Ops, device: torch.device, rng: torch.Generator, head_dim: int, block_size: int
) -> None:
    shape = PagedShape(
        sequences=((70, 1), (9, 3)),
        num_heads=3,
        num_kv_heads=1,
        head_dim=head_dim,
        block_size=block_size,
        window=50,
        softcap=0.8,
        has_sinks=True,
    )
    check(ops, paged_case(shape, generator=rng, device=device))


@pytest.mark.parametrize("softcap", [0.0, 0.8])
def test_reference_reads_an_8_bit_pool(rng: torch.Generator, softcap: float) -> None:
    """As it reads the true keys and values."""
    shape = PagedShape(sequences=MIXED, kv_dtype=E4M3, softcap=softcap)
    case = paged_case(shape, generator=rng)
    expected = attend(reference.OPS, dataclasses.replace(case, pool=case.pool.float() * 0.5))
    options = dataclasses.replace(case.options, k_scale=0.5, v_scale=0.5)
    scaled = dataclasses.replace(case, options=options)
    assert_near(attend(reference.OPS, scaled), expected)


@pytest.mark.parametrize("softcap", [0.0, 0.8])
@pytest.mark.parametrize("size", [(64, 16), (256, 128)])
def test_gpu_reads_an_8_bit_pool(
    gpu_ops: Ops,
    gpu_device: torch.device,
    rng: torch.Generator,
    softcap: float,
    size: tuple[int, int],
) -> None:
    shape = PagedShape(
        sequences=MIXED,
        head_dim=size[0],
        block_size=size[1],
        num_heads=4,
        softcap=softcap,
        has_sinks=True,
        kv_dtype=E4M3,
        k_scale=1.7,
        v_scale=0.3,
    )
    check(gpu_ops, paged_case(shape, generator=rng, device=gpu_device))


@pytest.mark.gpu
def test_nan_in_an_8_bit_pool_stays_unread(gpu_ops: Ops, gpu_device: torch.device) -> None:
    """Under the interpreter, which reads the NaN of this format as 480, it would show nothing."""
    shape = PagedShape(sequences=MIXED, kv_dtype=E4M3, softcap=0.8, has_sinks=True, window=6)
    outs: list[Tensor] = []
    for garbage in (0.0, torch.nan):
        generator = torch.Generator().manual_seed(1)
        case = paged_case(shape, generator=generator, device=gpu_device, garbage=garbage)
        outs.append(attend(gpu_ops, case))
    assert torch.equal(*outs)
    assert outs[0].isfinite().all()


def test_cpu_refuses_an_8_bit_pool(rng: torch.Generator) -> None:
    case = paged_case(PagedShape(sequences=MIXED, kv_dtype=E4M3), generator=rng)
    with pytest.raises(ValueError, match="must be float32, bfloat16 or float16"):
        attend(cpu.OPS, case)
    scaled = paged_case(PagedShape(sequences=MIXED, v_scale=0.3), generator=rng)
    with pytest.raises(ValueError, match=r"v_scale 0\.3; on the CPU both must be 1"):
        attend(cpu.OPS, scaled)


@pytest.mark.parametrize(
    ("capability", "hip_version", "message"),
    [
        ((8, 0), None, r"needs compute capability 8\.9 or later; the device has 8\.0"),
        ((9, 4), "6.4", "needs an NVIDIA device"),
    ],
)
def test_devices_that_cannot_convert_are_refused(
    capability: tuple[int, int], hip_version: str | None, message: str
) -> None:
    from pageray.kernels.gpu.checks import check_e4m3

    check_e4m3((8, 9), None)
    check_e4m3((10, 0), None)
    with pytest.raises(ValueError, match=message):
        check_e4m3(capability, hip_version)


def test_a_sink_for_every_head_or_none(
    ops: Ops, device: torch.device, rng: torch.Generator
) -> None:
    case = paged_case(PagedShape(sequences=MIXED), generator=rng, device=device)
    with pytest.raises(ValueError, match=r"sinks.* has shape"):
        attend(ops, with_sinks(case, torch.zeros(5, device=device)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("window", -1),
        ("softcap", -1.0),
        ("softcap", math.nan),
        ("k_scale", 0.0),
        ("v_scale", math.inf),
    ],
)
def test_options_out_of_range_are_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value}; it must be positive"):
        AttentionOptions(scale=1.0, **{field: value})  # pyright: ignore[reportArgumentType]
