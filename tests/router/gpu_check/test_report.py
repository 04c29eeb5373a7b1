import msgspec

from pageray.router.bench.gpu_check.chip import slug
from pageray.router.bench.gpu_check.findings import (
    AccuracyRow,
    AttentionRow,
    Chip,
    Findings,
    ServingRow,
    StageOutcome,
    TimingRow,
    merge,
)
from pageray.router.bench.gpu_check.report import DRY_RUN, markdown, table
from pageray.router.bench.gpu_check.run_stages import judged

CHIP = Chip(
    name="NVIDIA Example 80GB",
    driver="1.2",
    cuda="13.0",
    torch="2.11.0",
    triton="3.6.0",
    memory_bytes=80 << 30,
    l2_bytes=50 << 20,
    copy_bytes_per_s=2e12,
    matmul_flop_per_s=8e14,
    matmul_dtype="bfloat16",
)


def accuracy(shape: str, error: float, failure: str = "") -> AccuracyRow:
    return AccuracyRow(
        kernel="rope", shape=shape, dtype="float16", error=error, bound=2e-3, failure=failure
    )


def timing(failure: str = "") -> TimingRow:
    return TimingRow(
        kernel="linear",
        shape="m",
        num_tokens=64,
        seconds=0.0 if failure else 1e-3,
        num_bytes=10**9,
        num_flops=2 * 10**11,
        failure=failure,
    )


def attention(torch_seconds: float) -> AttentionRow:
    return AttentionRow(
        phase="decode",
        shape="m",
        batch=16,
        kv_len=1024,
        seconds=2e-3,
        torch_seconds=torch_seconds,
        num_bytes=10**9,
        num_flops=0,
    )


SERVING = ServingRow(
    model="folder/name",
    dtype="bfloat16",
    num_requests=16,
    input_len=128,
    output_len=256,
    graph_tokens_per_s=3000.0,
    eager_tokens_per_s=1000.0,
    num_equal=15,
)
OUTCOME = StageOutcome(name="accuracy", status="ok", elapsed_s=1.4)


def lines(findings: Findings, is_dry_run: bool = False) -> list[str]:
    return markdown(findings, "pageray bench gpu", is_dry_run).splitlines()


def test_rates_and_shares() -> None:
    findings = Findings(
        chip=CHIP, kernels=(timing(),), attention=(attention(3e-3),), serving=(SERVING,)
    )
    page = lines(findings)
    assert page[0] == "# NVIDIA Example 80GB"
    assert "| linear | m | 64 | 1000.0 | 1000 | 50 | 25 |" in page
    assert "| decode | m | 16 | 1024 | 2000.0 | 25 | 3000.0 | 1.50 |" in page
    assert "| 16 | 128 + 256 | 3000 | 1000 | 3.00 | 15 of 16 |" in page


def test_each_kernel_shows_its_worst_shape() -> None:
    good, bad = accuracy("a", 1e-4), accuracy("b", 3e-3)
    assert "| rope | float16 | b | 3.0e-03 | 2.0e-03 | WRONG |" in lines(
        Findings(accuracy=(good, bad, accuracy("c", 2e-4)))
    )
    failed = accuracy("d", 0.0, "RuntimeError: no")
    for rows in ((failed, bad), (bad, failed)):
        page = lines(Findings(accuracy=rows))
        assert "| rope | float16 | d |  |  | RuntimeError: no |" in page


def test_a_dry_run_says_so_first() -> None:
    page = lines(Findings(chip=CHIP), is_dry_run=True)
    assert page[0] == "# Dry run"
    assert page[2] == f"**{DRY_RUN}**"


def test_what_could_not_be_timed_says_why() -> None:
    page = lines(Findings(chip=CHIP, kernels=(timing("OutOfResources: shared memory"),)))
    assert "| linear | m | 64 | OutOfResources: shared memory |  |  |  |" in page


def test_wrong_rows_fail_a_stage_that_ended_well() -> None:
    found = Findings(accuracy=(accuracy("a", 1e-4), accuracy("b", 3e-3)), kernels=(timing("no"),))
    outcome = judged(OUTCOME, found)
    assert outcome.status == "failed"
    assert outcome.message.splitlines() == [
        "rope at b in float16: error 3.00e-03, bound 2.00e-03",
        "linear at m, 64 tokens: no",
    ]
    assert judged(OUTCOME, Findings(accuracy=(accuracy("a", 1e-4),))) == OUTCOME
    assert "| accuracy | failed | 1 |" in lines(Findings(stages=(outcome,)))


def test_parts_come_together_and_survive_json() -> None:
    parts = [
        Findings(accuracy=(accuracy("a", 1.0),)),
        Findings(chip=CHIP),
        Findings(kernels=(timing("no"),), serving=(SERVING,)),
    ]
    merged = merge(parts, (OUTCOME,))
    assert merged.chip == CHIP
    assert merged.stages == (OUTCOME,)
    assert (len(merged.accuracy), len(merged.kernels), len(merged.serving)) == (1, 1, 1)
    assert msgspec.json.decode(msgspec.json.encode(merged), type=Findings) == merged


def test_names_of_chips_as_names_of_files() -> None:
    assert slug("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"
    assert slug("Tesla T4 ") == "tesla-t4"


def test_numbers_are_aligned_to_the_right() -> None:
    expected = "| a | b |\n| --- | ---: |\n| x | 1 |"
    assert table(("a", "b"), [("x", "1")], num_left=1) == expected
