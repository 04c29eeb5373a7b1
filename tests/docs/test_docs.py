"""The documents name files and functions that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIFE = ROOT / "docs" / "life-of-a-request.md"
STEPS = [line for line in LIFE.read_text().splitlines() if re.match(r"\d+\. ", line)]


def test_steps_are_numbered_without_gaps() -> None:
    assert [int(step.split(".")[0]) for step in STEPS] == list(range(1, len(STEPS) + 1))
    assert len(STEPS) > 10


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.split(".")[0])
def test_each_step_names_code_that_exists(step: str) -> None:
    names = re.findall(r"`([^`]+)`", step)
    current = ROOT
    assert any(name.endswith(".py") for name in names), "a step names at least one file"
    for name in names:
        if name.endswith(".py"):
            current = ROOT / name
            assert current.is_file(), f"{name} does not exist"
        else:
            assert re.search(rf"^\s*(async )?def {name}\(", current.read_text(), re.MULTILINE), (
                f"{current.name} has no function {name}"
            )


@pytest.mark.parametrize("document", [*sorted(ROOT.glob("docs/**/*.md")), ROOT / "README.md"])
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
        assert (document.parent / target).exists(), f"{document.name} links to {target}"
