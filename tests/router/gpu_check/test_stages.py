"""The stages themselves, on the CPU and on tiny shapes."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from model_folder import llama_config, save_small_model
from pageray.cluster.errors import ConfigError
from pageray.router.bench.gpu_check import run_stages as run_stages_module
from pageray.router.bench.gpu_check.findings import Findings, StageName
from pageray.router.bench.gpu_check.run_stages import run_stages
from pageray.router.bench.gpu_check.stages import (
    GPU_TESTS,
    STAGES,
    CheckOptions,
    parse_stages,
    run_stage,
    stage_command,
)
from pageray.router.cli import main

ROOT = Path(__file__).parents[3]
QUICK = CheckOptions(device="cpu", is_quick=True, model="unused")


def test_device_kernels_and_attention() -> None:
    chip = run_stage("chip", QUICK).chip
    assert chip is not None
    assert chip.copy_bytes_per_s > 0
    assert chip.matmul_flop_per_s > 0
    kernels = run_stage("kernels", QUICK)
    assert {row.kernel for row in kernels.kernels} >= {"linear", "paged_attention", "sample"}
    assert all(row.seconds > 0 and row.num_bytes > 0 for row in kernels.kernels)
    attention = run_stage("attention", QUICK)
    assert [row.phase for row in attention.attention] == ["decode", "prefill"]
    assert all(row.torch_seconds > 0 for row in attention.attention)
    assert kernels.problems == attention.problems == []


def test_an_engine_is_run_twice_and_its_tokens_compared(tmp_path: Path) -> None:
    save_small_model(tmp_path, llama_config())
    options = CheckOptions(device="cpu", is_quick=True, model=str(tmp_path))
    (row,) = run_stage("serving", options).serving
    assert row.num_equal == row.num_requests
    assert row.graph_tokens_per_s > 0
    assert row.eager_tokens_per_s > 0


def test_the_command_leaves_a_report_that_says_what_it_is(tmp_path: Path) -> None:
    arguments = ["bench", "gpu", "--device", "cpu", "--quick", "--stages", "accuracy,tests"]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    findings = msgspec.json.decode((tmp_path / "json/dry-run.json").read_bytes(), type=Findings)
    outcomes = [(stage.name, stage.status) for stage in findings.stages]
    assert outcomes == [("tests", "skipped"), ("accuracy", "ok")]
    assert findings.accuracy
    assert (tmp_path / "dry-run.md").read_text().startswith("# Dry run\n")


def test_a_stage_that_fails_or_dies_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scripts: dict[StageName, str] = {
        "chip": "raise SystemExit('the device is gone')",
        "accuracy": "import os; os.abort()",
        "kernels": "import sys; open(sys.argv[1], 'w').write('{}'); print('fine')",
    }

    def command(name: StageName, options: CheckOptions, part: Path) -> Sequence[str]:
        return [sys.executable, "-c", scripts[name], str(part)]

    monkeypatch.setattr(run_stages_module, "stage_command", command)
    said: list[str] = []
    outcomes = run_stages(list(scripts), QUICK, said.append).stages
    assert [outcome.status for outcome in outcomes] == ["failed", "failed", "ok"]
    assert outcomes[0].message == "exit status 1\nthe device is gone"
    assert outcomes[1].message.startswith("exit status -6")
    assert "fine" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_ends_with_one_line_and_status_3(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "gpu"]) == 3
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cpu", "--quick"], "Say with --out where they go."),
        (["--device", "cpu", "--quick", "--only", "kernel"], "There is no stage 'kernel'"),
        (["--device", "cpu", "--quick", "--only", "tests"], "run `pytest -m gpu`"),
    ],
)
def test_wrong_arguments_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "gpu", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_stages_run_in_their_own_order() -> None:
    assert parse_stages("serving,chip") == ("chip", "serving")
    assert STAGES[0] == "tests"
    with pytest.raises(ConfigError, match="'speed'"):
        parse_stages("chip,speed")


def test_a_stage_gets_the_options_of_the_whole() -> None:
    options = CheckOptions(device="cuda", is_quick=True, model="m")
    command = " ".join(stage_command("serving", options, Path("p.json")))
    assert command.endswith(
        "bench gpu --device cuda --model m --only serving --json p.json --quick"
    )
    assert "-m gpu" in " ".join(stage_command("tests", options, Path("p.json")))


def test_every_test_for_a_gpu_is_where_the_check_looks() -> None:
    mark = "mark." + "gpu"
    marked = [path for path in (ROOT / "tests").rglob("*.py") if mark in path.read_text()]
    places = [ROOT / place for place in GPU_TESTS]
    assert len(marked) >= 2
    assert all(any(path.is_relative_to(place) for place in places) for path in marked)


def test_the_script_without_a_gpu_ends_with_one_line_and_status_3(tmp_path: Path) -> None:
    """Its PYTHON sees no CUDA, and there is no nvidia-smi: nothing is installed."""
    copy = tmp_path / "benchmarks" / "gpu_check.sh"
    copy.parent.mkdir()
    copy.write_bytes((ROOT / "benchmarks/gpu_check.sh").read_bytes())
    stubs = tmp_path / "bin"
    stubs.mkdir()
    for name, status in (("nvidia-smi", 9), ("make", 7)):
        stub = stubs / name
        stub.write_text(f"#!/bin/sh\nexit {status}\n")
        stub.chmod(0o755)
    environment = {"PATH": f"{stubs}:/usr/bin:/bin", "PYTHON": "/bin/false"}
    done = subprocess.run(
        ["bash", str(copy)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 3
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / ".venv").exists()
