"""`pageray simulate`."""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from pageray.router.cli import main

ROWS = (
    {"timestamp": 0, "input_length": 1500, "output_length": 3, "hash_ids": [0, 1, 2]},
    {"timestamp": 4000, "input_length": 1600, "output_length": 2, "hash_ids": [0, 1, 2, 3]},
    {"timestamp": 8000, "input_length": 600, "output_length": 9, "hash_ids": [0, 4]},
)


@pytest.fixture(name="trace")
def make_trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def test_a_trace_is_replayed_and_reported(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, plot = tmp_path / "out" / "r.json", tmp_path / "out" / "r.svg"
    policies = ["--policy", "ours", "--policy", "round-robin"]
    files = ["--json", str(report), "--plot", str(plot)]
    assert main(["simulate", "--trace", str(trace), "--engines", "2", *policies, *files]) == 0
    assert "round-robin" in capsys.readouterr().out
    ours, round_robin = json.loads(report.read_text())["rows"]
    assert (ours["policy"], ours["engines"], ours["requests"]) == ("ours", 2, 3)
    # Of 3,700 tokens, blocks 0, 1 and 0 again.
    assert ours["optimal_hit_rate"] == pytest.approx(1536 / 3700, abs=1e-4)
    assert ours["hit_rate"] == ours["optimal_hit_rate"]
    assert ours["computed_prefill_tokens"] == ours["optimal_prefill_tokens"] == 3700 - 1536
    # In turn: the third is back at the first engine, the second finds nothing.
    assert round_robin["hit_rate"] == pytest.approx(512 / 3700, abs=1e-4)
    texts = [element.text for element in ET.fromstring(plot.read_text()).iter() if element.text]
    assert {"ours", "round-robin", "p50", "p99"} <= set(texts)


def test_the_same_seed_gives_the_same_bytes_in_every_process(tmp_path: Path) -> None:
    def run(seed: int, hash_seed: int) -> bytes:
        path = tmp_path / f"{seed}-{hash_seed}.json"
        command = [sys.executable, "-P", "-m", "pageray.router.cli", "simulate"]
        options = f"--requests 12 --engines 3 --seed {seed} --policy ours --policy power-of-two"
        subprocess.run(
            [*command, *options.split(), "--json", str(path)],
            env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
            check=True,
            stdout=subprocess.DEVNULL,
        )
        return path.read_bytes()

    first = run(1, 0)
    assert first == run(1, 4711)
    assert first != run(2, 0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--policy", "best"], "best is not known; there are ours"),
        (["--engines", "0"], "--engines is 0"),
        (["--max-output", "0"], "--max-output is 0"),
        (["--plot", "x.png"], "only .svg"),
        (["--trace", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--blocks", "5"], "an engine has 5"),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--requests", "3", *options]) == 1
    assert said in capsys.readouterr().err


def test_a_line_that_is_no_row_is_named(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace.write_text('{"timestamp": 0}\n')
    assert main(["simulate", "--trace", str(trace)]) == 1
    assert "input_length" in capsys.readouterr().err
