"""Starting the stages one after the other and collecting what they found."""

import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from pageray.router.bench.gpu_check.findings import (
    Findings,
    StageName,
    StageOutcome,
    Status,
    merge,
)
from pageray.router.bench.gpu_check.stages import CheckOptions, stage_command

_TAIL_LINES = 15
_REPOSITORY_FILES = ("pyproject.toml", "tests")

Say = Callable[[str], None]


def run_stages(names: Sequence[StageName], options: CheckOptions, say: Say) -> Findings:
    """All of `names`, whatever becomes of each. `say` gets every line that they print."""
    parts: list[Findings] = []
    outcomes: list[StageOutcome] = []
    with tempfile.TemporaryDirectory(prefix="pageray-gpu-") as folder:
        for name in names:
            say(f"== {name}")
            part = Path(folder) / f"{name}.json"
            outcome = _run(name, options, part, say)
            if part.is_file():
                found = msgspec.json.decode(part.read_bytes(), type=Findings)
                parts.append(found)
                outcome = judged(outcome, found)
            say(f"== {name}: {outcome.status} after {outcome.elapsed_s:.0f} s")
            outcomes.append(outcome)
    return merge(parts, tuple(outcomes))


def judged(outcome: StageOutcome, found: Findings) -> StageOutcome:
    """A stage that ended well but found something wrong has failed, and says what."""
    if outcome.status != "ok" or not found.problems:
        return outcome
    message = "\n".join(found.problems)
    return msgspec.structs.replace(outcome, status="failed", message=message)


def _run(name: StageName, options: CheckOptions, part: Path, say: Say) -> StageOutcome:
    reason = _why_not(name, options)
    if reason is not None:
        return StageOutcome(name=name, status="skipped", elapsed_s=0.0, message=reason)
    begun_s = time.monotonic()
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    with subprocess.Popen(
        stage_command(name, options, part),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None, "it was asked for"
        for line in process.stdout:
            say(line.rstrip("\n"))
            tail.append(line.rstrip("\n"))
    status: Status = "ok" if process.returncode == 0 else "failed"
    message = f"exit status {process.returncode}\n" + "\n".join(tail) if process.returncode else ""
    if name == "tests" and tail:
        message = message or tail[-1]
    return StageOutcome(
        name=name, status=status, elapsed_s=time.monotonic() - begun_s, message=message
    )


def _why_not(name: StageName, options: CheckOptions) -> str | None:
    if name != "tests":
        return None
    if options.device != "cuda":
        return "its tests need a CUDA device"
    if not all(Path(file).exists() for file in _REPOSITORY_FILES):
        return "the tests are not here: run it in the repository's root"
    return None
