"""`pageray bench`: a group whose sub-commands are the modules `bench_*.py` beside this one."""

import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import cast

from pageray.router.commands.subparsers import Subparsers

_PREFIX = "bench_"


def add_parser(subparsers: Subparsers) -> None:
    """Each `bench_X.py` has `add_parser(subparsers)` and imports what is heavy when it runs."""
    parser = subparsers.add_parser("bench", help="measure a server or an engine")
    group = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    for name in bench_modules():
        module = importlib.import_module(f"pageray.router.commands.{name}")
        add = cast("Callable[[Subparsers], None]", vars(module)["add_parser"])
        add(group)


def bench_modules() -> list[str]:
    """Names of the benchmark modules, in alphabetical order."""
    found = pkgutil.iter_modules([str(Path(__file__).parent)])
    return sorted(module.name for module in found if module.name.startswith(_PREFIX))
