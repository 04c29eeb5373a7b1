"""`pageray bench engine`: one engine, offline, under a batch of equal requests."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from pageray.cluster.errors import ConfigError
from pageray.router.bench.machine import Machine, describe_machine
from pageray.router.commands.subparsers import Subparsers

if TYPE_CHECKING:
    from pageray.router.bench.engine_bench import EngineFigures


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("engine", help="throughput and latency of one engine")
    parser.description = __doc__
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.add_argument("--model", default="smollm2-135m", help="folder, hub id or embedded name")
    parser.add_argument("--requests", type=int, default=32, metavar="N")
    parser.add_argument("--input-len", type=int, default=128, metavar="TOKENS")
    parser.add_argument("--output-len", type=int, default=64, metavar="TOKENS")
    parser.add_argument(
        "--shared-len", type=int, default=0, metavar="TOKENS", help="prompt tokens shared by all"
    )
    parser.add_argument("--repeat", type=int, default=1, help="runs; the median one is reported")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="settings",
        help="engine setting, as under engine_kwargs",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    # The engine brings torch; `pageray --help` should not wait for it.
    from tqdm import tqdm

    from pageray.router.bench.engine_bench import EngineLoad, measure_engine

    if not 0 <= arguments.shared_len <= arguments.input_len:
        raise ConfigError(
            f"--shared-len is {arguments.shared_len}; it must be between 0 and --input-len "
            f"({arguments.input_len})."
        )
    workload = {
        "num_requests": arguments.requests,
        "input_len": arguments.input_len,
        "output_len": arguments.output_len,
        "shared_len": arguments.shared_len,
    }
    loads = [EngineLoad(**workload, seed=arguments.seed + i) for i in range(arguments.repeat)]
    settings = dict(_setting(text) for text in arguments.settings)
    total = arguments.requests * arguments.output_len * arguments.repeat
    with tqdm(total=total, unit="tok", disable=not sys.stderr.isatty()) as bar:
        figures, dtype = measure_engine({"model": arguments.model, **settings}, loads, bar.update)
    machine = describe_machine()
    _print(workload, figures, machine)
    if arguments.json is not None:
        report = {
            "model": arguments.model,
            "dtype": dtype,
            "settings": settings,
            "workload": {**workload, "repeat": arguments.repeat},
            **asdict(figures),
            "machine": machine,
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def _setting(text: str) -> tuple[str, object]:
    key, separator, value = text.partition("=")
    if not separator:
        raise ConfigError(f"--set {text!r} is not of the form KEY=VALUE.")
    return key, yaml.safe_load(value)


def _print(workload: dict[str, int], figures: "EngineFigures", machine: Machine) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title="{num_requests} requests, {input_len} in ({shared_len} shared), "
        "{output_len} out".format(**workload)
    )
    table.add_column("figure")
    for column in ("p50", "p90", "p99"):
        table.add_column(column, justify="right")
    table.add_row("output tokens/s", f"{figures.output_tokens_per_s:.1f}")
    for name, summary in (
        ("time to first token, ms", figures.ttft_ms),
        ("time per output token, ms", figures.tpot_ms),
    ):
        table.add_row(name, *(f"{summary[p]:.1f}" for p in ("p50", "p90", "p99")))
    table.add_row("KV waste, %", f"{100 * figures.kv_waste:.1f}")
    table.add_row("preemptions", str(figures.preemptions))
    console = Console()
    console.print(table)
    console.print(f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}")
