"""`pageray simulate`: a whole cluster in simulated time, to compare how requests are placed."""

import argparse
import gc
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pageray.cluster.errors import ConfigError
from pageray.router.commands.subparsers import Subparsers

if TYPE_CHECKING:
    from pageray.cluster.simulation.simulation import SimulationSettings
    from pageray.cluster.simulation.workload import Arrival
    from pageray.router.simulate_report import Row

SHARED_PREFIX = "shared-prefix"


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("simulate", help="a cluster in simulated time, by policy")
    parser.description = __doc__
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.add_argument(
        "--trace",
        default=SHARED_PREFIX,
        metavar="FILE",
        help="JSON lines as in Mooncake's FAST'25 traces, or shared-prefix for made-up requests",
    )
    parser.add_argument("--engines", type=int, default=8, metavar="N")
    parser.add_argument(
        "--policy",
        action="append",
        metavar="NAME",
        help="may be given several times; all of them without it: ours, route-only, move-only, "
        "least-loaded, power-of-two, round-robin",
    )
    parser.add_argument("--requests", type=int, metavar="N", help="only the first N")
    parser.add_argument("--speed", type=float, default=1.0, help="compress a trace's time by this")
    parser.add_argument("--rate", type=float, default=8.0, help="made-up requests per second")
    parser.add_argument("--max-output", type=int, metavar="TOKENS", help="cut longer outputs")
    parser.add_argument("--blocks", type=int, default=800, help="KV blocks (512 tokens) per engine")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here too")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the rows")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from tqdm import tqdm

    from pageray.cluster.simulation.workload import optimal_hit_tokens
    from pageray.router.simulate_plot import draw
    from pageray.router.simulate_report import Report, print_report

    policies = _policies(arguments)
    _check(arguments)
    arrivals = _arrivals(arguments)
    num_optimal = optimal_hit_tokens(arrivals, _settings(arguments, policies[0]).engine.block_size)
    rows: list[Row] = []
    for policy in policies:
        with tqdm(
            total=len(arrivals), desc=policy, unit="request", disable=not sys.stderr.isatty()
        ) as bar:
            settings = _settings(arguments, policy)
            rows.append(_row(settings, arrivals, arguments.seed, num_optimal, bar.update))
    report = Report(
        workload=Path(arguments.trace).name,
        speed=arguments.speed,
        seed=arguments.seed,
        max_output=arguments.max_output,
        settings=_settings(arguments, policies[0]),
        rows=rows,
    )
    print_report(report)
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_bytes(msgspec.json.format(report.encode()) + b"\n")
    if arguments.plot is not None:
        arguments.plot.parent.mkdir(parents=True, exist_ok=True)
        arguments.plot.write_text(draw(report), encoding="utf-8")
    return 0


def _row(
    settings: "SimulationSettings",
    arrivals: "list[Arrival]",
    seed: int,
    num_optimal: int,
    on_finished: Callable[[], object],
) -> "Row":
    from pageray.cluster.simulation.simulation import Simulation
    from pageray.router.simulate_report import row_of

    # What lives long is looked at over and over otherwise: a third of the time.
    gc.collect()
    gc.disable()
    try:
        result = Simulation(settings, random.Random(seed)).run(arrivals, on_finished)
        return row_of(settings, result, num_optimal)
    finally:
        gc.enable()


def _policies(arguments: argparse.Namespace) -> list[str]:
    from pageray.cluster.simulation.policies import POLICIES

    names: list[str] = arguments.policy or list(POLICIES)
    for name in names:
        if name not in POLICIES:
            raise ConfigError(f"--policy {name} is not known; there are {', '.join(POLICIES)}.")
    return names


def _check(arguments: argparse.Namespace) -> None:
    for name in ("engines", "speed", "rate", "blocks"):
        if not vars(arguments)[name] > 0:
            raise ConfigError(f"--{name} is {vars(arguments)[name]}; it must be positive.")
    for name in ("requests", "max_output"):
        value = vars(arguments)[name]
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be 1 or more.")
    if arguments.plot is not None and arguments.plot.suffix != ".svg":
        raise ConfigError(f"--plot is {arguments.plot}; only .svg can be drawn.")


def _settings(arguments: argparse.Namespace, policy: str) -> "SimulationSettings":
    from pageray.cluster.simulation.engine import EngineSettings
    from pageray.cluster.simulation.simulation import SimulationSettings

    return SimulationSettings(
        num_engines=arguments.engines,
        policy=policy,
        engine=EngineSettings(num_blocks=arguments.blocks),
    )


def _arrivals(arguments: argparse.Namespace) -> "list[Arrival]":
    """Checked against what an engine can hold. Raises `ConfigError`."""
    from dataclasses import replace

    from pageray.cluster.memory_plan import worst_case_blocks

    made = _made_up(arguments) if arguments.trace == SHARED_PREFIX else _from_trace(arguments)
    if arguments.max_output is not None:
        cap = arguments.max_output
        made = [replace(a, num_output_tokens=min(cap, a.num_output_tokens)) for a in made]
    if not made:
        raise ConfigError(f"{arguments.trace} has no requests.")
    settings = _settings(arguments, "ours").engine
    for each in made:
        needed = worst_case_blocks(
            each.num_prompt_tokens, each.num_output_tokens, 1, settings.block_size
        )
        if needed > settings.num_blocks:
            raise ConfigError(
                f"A request needs {needed} blocks; an engine has {settings.num_blocks} (--blocks)."
            )
    return made


def _made_up(arguments: argparse.Namespace) -> "list[Arrival]":
    from pageray.cluster.simulation.workload import (
        TRACE_BLOCK_SIZE,
        SharedPrefixLoad,
        shared_prefix_arrivals,
    )

    load = SharedPrefixLoad(
        num_requests=arguments.requests or 2_000, requests_per_s=arguments.rate * arguments.speed
    )
    return list(shared_prefix_arrivals(load, TRACE_BLOCK_SIZE, random.Random(arguments.seed)))


def _from_trace(arguments: argparse.Namespace) -> "list[Arrival]":
    from itertools import islice

    from pageray.cluster.simulation.workload import TraceRow, arrivals_of_trace

    decode = msgspec.json.Decoder(TraceRow).decode
    try:
        with Path(arguments.trace).open("rb") as lines:
            rows = [decode(line) for line in islice(lines, arguments.requests)]
    except OSError as error:
        raise ConfigError(f"--trace: {error}.") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--trace {arguments.trace}: {error}.") from error
    return list(arrivals_of_trace(rows, arguments.speed))
