"""The soak test in its shortest form: half a minute of kills under load."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest


@pytest.mark.ray
@pytest.mark.timeout(500)
def test_half_a_minute_of_kills_harms_no_answer(tmp_path: Path) -> None:
    report = tmp_path / "soak.json"
    command = ["soak", "--minutes", "0.6", "--pause-s", "8", "--questions", "8"]
    run = subprocess.run(
        [sys.executable, "-P", "-m", "pageray.router.cli", *command, "--json", str(report)],
        check=False,
        capture_output=True,
        text=True,
        timeout=450,
    )
    assert report.exists(), run.stderr[-3000:]
    result = msgspec.json.decode(report.read_bytes())
    assert run.returncode == 0, result
    assert result["wrong"] == []
    assert result["complaints"] == []
    assert result["num_right"] > 10
    assert sum(result["kills"].values()) >= 2
