"""`pageray bench engine` on the real model, small."""

import json
from pathlib import Path

import pytest

from pageray.router.cli import main


def test_report_has_every_figure_and_they_fit_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "deep" / "bench.json"
    arguments = "bench engine --requests 6 --input-len 40 --output-len 5 --shared-len 32 --repeat 2"
    settings = ["--set", "num_gpu_blocks_override=12", "--set", "max_num_seqs=4"]
    assert main([*arguments.split(), *settings, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["workload"] == {
        "num_requests": 6,
        "input_len": 40,
        "output_len": 5,
        "shared_len": 32,
        "repeat": 2,
    }
    assert report["output_tokens_per_s"] == pytest.approx(30 / report["elapsed_s"])
    assert report["total_tokens_per_s"] == pytest.approx(270 / report["elapsed_s"])
    for name in ("ttft_ms", "tpot_ms"):
        assert 0 < report[name]["p50"] <= report[name]["p90"] <= report[name]["p99"]
    assert report["ttft_ms"]["p99"] <= 1e3 * report["elapsed_s"]
    assert 0 < report["kv_waste"] < 1
    assert report["preemptions"] >= 0
    # At most four sequences run at once, so six requests need more steps than one wave of five.
    assert report["num_steps"] > 5
    assert report["computed_tokens"] < 6 * 44
    assert report["machine"]["cores"] >= 1
    assert report["machine"]["cpu"]
    assert "6 requests, 40 in (32 shared), 5 out" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shared-len", "200"], "--shared-len is 200; it must be between 0 and --input-len"),
        (["--set", "block_size"], "is not of the form KEY=VALUE"),
        (["--set", "blocksize=3"], "Did you mean 'block_size'?"),
        (["--input-len", "9000"], "limited to 8192 tokens"),
    ],
)
def test_wrong_arguments_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "engine", "--set", "num_gpu_blocks_override=12", *arguments]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("pageray: ")
    assert message in error
