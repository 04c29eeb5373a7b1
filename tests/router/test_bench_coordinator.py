"""`pageray bench coordinator`, small."""

import json
from pathlib import Path

import pytest

from pageray.router.bench.coordinator_bench import CoordinatorLoad
from pageray.router.cli import main


def test_report_has_every_figure_and_they_fit_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "deep" / "bench.json"
    arguments = "bench coordinator --entries 20000 --engines 20 --prompt-blocks 160"
    assert main([*arguments.split(), "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert set(report) == {
        "entries",
        "engines",
        "prompt_blocks",
        "bytes_per_entry",
        "lookups_per_s",
        "lookup_p99_ms",
        "matched_blocks_per_s",
        "events_per_s",
        "machine",
    }
    assert (report["entries"], report["engines"], report["prompt_blocks"]) == (20000, 20, 160)
    # Some engine holds the beginning of most prompts, none more than all of one.
    assert 20 < report["matched_blocks_per_s"] / report["lookups_per_s"] <= 160
    assert report["lookup_p99_ms"] > 0
    assert report["events_per_s"] > 0
    assert "20,000 entries, 20 engines" in " ".join(capsys.readouterr().out.split())


def test_the_load_is_as_described() -> None:
    load = CoordinatorLoad(num_entries=9000, num_engines=3, prompt_blocks=160)
    held = [[key for batch in load.held_by(engine) for key in batch] for engine in range(3)]
    assert [len(keys) for keys in held] == [3000] * 3
    assert [len(set(keys)) for keys in held] == [3000] * 3
    first, sibling, stranger = load.prompt(0), load.prompt(19), load.prompt(20)
    assert load.prompt(0) == first
    assert first[:10] == sibling[:10]
    assert not set(first[10:]) & set(sibling[10:])
    assert not set(first) & set(stranger)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engines", "0"], "--engines is 0; it must be between 1 and --entries"),
        (["--entries", "10"], "--engines is 1000; it must be between 1 and --entries (10)"),
        (["--prompt-blocks", "0"], "--prompt-blocks is 0"),
    ],
)
def test_wrong_arguments_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "coordinator", *arguments]) == 1
    assert message in capsys.readouterr().err.splitlines()[-1]
