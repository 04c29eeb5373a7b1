"""The processes of one Ray cluster that a soak test may kill, by what they are."""

import os
import random
import signal
from enum import Enum
from pathlib import Path

import ray


class Victim(Enum):
    RANK = "rank"
    ENGINE = "engine"
    COORDINATOR = "coordinator"
    STALLED_RANK = "stalled rank"
    """Stopped rather than killed: it lives, and does nothing."""


_TITLES = {
    Victim.RANK: "ray::RankActor",
    Victim.ENGINE: "ray::ServeReplica:{app}:LLMServer",
    Victim.COORDINATOR: "ray::CoordinatorActor",
    Victim.STALLED_RANK: "ray::RankActor",
}
"""How Ray names the processes."""


def strike(victim: Victim, app_name: str, rng: random.Random) -> int | None:
    """Kill (or stop) one process of a kind; its id, or None when there is none just now.

    Only children of this cluster's own raylet are looked at.
    """
    title = _TITLES[victim].format(app=app_name)
    pids = sorted(pid for pid in _workers() if _title(pid).startswith(title))
    if not pids:
        return None
    pid = rng.choice(pids)
    try:
        os.kill(pid, signal.SIGSTOP if victim is Victim.STALLED_RANK else signal.SIGKILL)
    except ProcessLookupError:
        return None
    return pid


def _workers() -> list[int]:
    """Processes of every raylet that this driver's session has started."""
    session = str(ray.get_runtime_context().get_node_id())
    raylets = {
        pid
        for pid in _pids()
        if Path(_argv(pid)[0]).name == "raylet" and f"--node_id={session}" in " ".join(_argv(pid))
    }
    return [pid for pid in _pids() if _parent(pid) in raylets]


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _argv(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return [""]


def _title(pid: int) -> str:
    return _argv(pid)[0]


def _parent(pid: int) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    # The name in parentheses may hold anything, spaces and parentheses too.
    return int(stat.rpartition(")")[2].split()[1])
