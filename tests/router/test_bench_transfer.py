"""`pageray bench transfer`, small: the figures are there and fit together."""

import json
from pathlib import Path

import pytest

from pageray.router.cli import main


def test_report_has_every_transport_beside_its_reference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "deep" / "transfer.json"
    assert (
        main(["bench", "transfer", "--megabytes", "8", "--rounds", "1", "--json", str(path)]) == 0
    )
    report = json.loads(path.read_text())
    rows = report["rows"]
    assert {(row["transport"], row["with_checksums"]) for row in rows} >= {
        ("shared memory", False),
        ("shared memory", True),
        ("sockets", False),
        ("sockets", True),
        ("gRPC stream", False),
        ("gRPC stream", True),
        ("process group", True),
    }
    assert report["page_bytes"] == 368_640
    assert report["num_pages"] == 22
    assert report["machine"]["cores"] >= 1
    for row in rows:
        assert row["pages_per_s"] * 368_640 == pytest.approx(row["gbytes_per_s"] * 1e9)
        # One round, so the ratio is that of the two medians.
        ratio = row["gbytes_per_s"] / row["reference_gbytes_per_s"]
        assert row["ratio"] == pytest.approx(ratio)
    assert "gRPC stream" in capsys.readouterr().out


def test_nothing_to_move_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "transfer", "--megabytes", "0"]) == 1
    assert "a page has 368,640 bytes" in capsys.readouterr().err
