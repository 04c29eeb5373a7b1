"""`pageray bench transfer`: pages between two processes of this host, by every transport."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from pageray.cluster.errors import ConfigError
from pageray.router.bench.machine import describe_machine
from pageray.router.commands.subparsers import Subparsers

if TYPE_CHECKING:
    from pageray.router.bench.transfer_bench import TransferRow

_MEBIBYTE = 1 << 20


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("transfer", help="page transfer between two processes")
    parser.description = __doc__
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.add_argument(
        "--megabytes", type=int, default=512, metavar="MIB", help="moved in every round"
    )
    parser.add_argument("--rounds", type=int, default=7, help="the median one is reported")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    # The transports bring gRPC; `pageray --help` should not wait for it.
    from tqdm import tqdm

    from pageray.router.bench.transfer_bench import CASES, SMOLLM2_LAYOUT, measure_transfers

    page_bytes = SMOLLM2_LAYOUT.page_bytes(0)
    num_pages = arguments.megabytes * _MEBIBYTE // page_bytes
    if num_pages < 1 or arguments.rounds < 1:
        raise ConfigError(
            f"--megabytes is {arguments.megabytes} and --rounds {arguments.rounds}; a page has "
            f"{page_bytes:,} bytes, and at least one page and one round are needed."
        )
    total = len(CASES) * (arguments.rounds + 1)
    with tqdm(total=total, unit="round", disable=not sys.stderr.isatty()) as bar:
        rows = measure_transfers(num_pages, arguments.rounds, arguments.seed, bar.update)
    machine = describe_machine()
    _print(rows, num_pages, page_bytes)
    if arguments.json is not None:
        report = {
            "page_bytes": page_bytes,
            "num_pages": num_pages,
            "rounds": arguments.rounds,
            "rows": [asdict(row) for row in rows],
            "machine": machine,
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def _print(rows: "Sequence[TransferRow]", num_pages: int, page_bytes: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{num_pages} pages of {page_bytes:,} bytes, two processes, one host")
    table.add_column("transport")
    table.add_column("checksums")
    for column in ("GB/s", "pages/s"):
        table.add_column(column, justify="right")
    table.add_column("reference")
    for column in ("GB/s", "ratio"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.transport,
            "on" if row.with_checksums else "off",
            f"{row.gbytes_per_s:.2f}",
            f"{row.pages_per_s:,.0f}",
            row.reference,
            f"{row.reference_gbytes_per_s:.2f}",
            f"{row.ratio:.2f}",
        )
    Console().print(table)
