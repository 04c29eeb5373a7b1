"""`pageray bench coordinator`: the cluster's block table, full, without a cluster."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from pageray.cluster.errors import ConfigError
from pageray.router.bench.machine import Machine, describe_machine
from pageray.router.commands.subparsers import Subparsers

if TYPE_CHECKING:
    from pageray.router.bench.coordinator_bench import CoordinatorFigures


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("coordinator", help="lookups in a full cluster block table")
    parser.description = __doc__
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.add_argument(
        "--entries", type=int, default=10_000_000, metavar="N", help="(engine, block) pairs"
    )
    parser.add_argument("--engines", type=int, default=1_000, metavar="N")
    parser.add_argument("--prompt-blocks", type=int, default=2_000, metavar="BLOCKS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from tqdm import tqdm

    from pageray.router.bench.coordinator_bench import CoordinatorLoad, measure_coordinator

    if not 1 <= arguments.engines <= arguments.entries:
        raise ConfigError(
            f"--engines is {arguments.engines}; it must be between 1 and --entries "
            f"({arguments.entries})."
        )
    if arguments.prompt_blocks < 1:
        raise ConfigError(f"--prompt-blocks is {arguments.prompt_blocks}; it must be 1 or more.")
    load = CoordinatorLoad(
        num_entries=arguments.entries,
        num_engines=arguments.engines,
        prompt_blocks=arguments.prompt_blocks,
        seed=arguments.seed,
    )
    with tqdm(total=load.num_entries, unit="block", disable=not sys.stderr.isatty()) as bar:
        figures = measure_coordinator(load, bar.update)
    machine = describe_machine()
    _print(figures, machine)
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        report = {**asdict(figures), "machine": machine}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def _print(figures: "CoordinatorFigures", machine: Machine) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{figures.entries:,} entries, {figures.engines:,} engines, "
        f"prompts of {figures.prompt_blocks:,} blocks"
    )
    table.add_column("figure")
    table.add_column("one core, CPU time", justify="right")
    for name, value in (
        ("memory per entry, bytes", f"{figures.bytes_per_entry:.1f}"),
        ("lookups/s", f"{figures.lookups_per_s:,.0f}"),
        ("lookup p99, ms", f"{figures.lookup_p99_ms:.3f}"),
        ("matched blocks/s", f"{figures.matched_blocks_per_s:,.0f}"),
        ("blocks stored/s", f"{figures.events_per_s:,.0f}"),
    ):
        table.add_row(name, value)
    console = Console()
    console.print(table)
    console.print(f"{machine['cpu']}, {machine['cores']} cores, Python {machine['python']}")
