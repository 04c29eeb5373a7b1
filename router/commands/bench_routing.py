"""`pageray bench routing`: ways to choose an engine, compared on real engines behind Ray Serve.

Each policy gets the same requests at the same times, on an application of its own: two CPU engines
of SmolLM2-135M with a cache that cannot hold everything, unless told otherwise.
"""

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from pageray.cluster.errors import ConfigError
from pageray.router.bench.machine import describe_machine
from pageray.router.commands.subparsers import Subparsers
from pageray.router.http_port import free_port

if TYPE_CHECKING:
    from rich.table import Table

    from pageray.router.bench.routing_bench import RoutingRow
    from pageray.router.bench.routing_load import RoutingLoad
    from pageray.router.bench.routing_policies import RoutingPolicy
    from pageray.router.bench.routing_testbed import RoutingTestbed


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("routing", help="request routing policies on real engines")
    parser.description = __doc__
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.add_argument("--requests", type=int, default=80, metavar="N", help="of each load")
    parser.add_argument(
        "--output-len", type=int, default=8, metavar="TOKENS", help="tokens asked of each request"
    )
    parser.add_argument("--replicas", type=int, default=2, metavar="N", help="engines")
    parser.add_argument(
        "--blocks", type=int, default=448, metavar="N", help="KV pool of an engine, in blocks"
    )
    parser.add_argument(
        "--utilization",
        type=float,
        default=0.65,
        help="arrival rate, as a share of what round robin answers",
    )
    parser.add_argument(
        "--rate", type=float, metavar="PER_S", help="arrival rate; nothing is measured for it"
    )
    prefixes = parser.add_argument_group("requests with shared prefixes")
    prefixes.add_argument("--groups", type=int, default=8, metavar="N", help="0: not this load")
    prefixes.add_argument("--prefix-len", type=int, default=304, metavar="TOKENS")
    prefixes.add_argument("--max-tail-len", type=int, default=48, metavar="TOKENS")
    prefixes.add_argument("--skew", type=float, default=1.0, help="exponent of the popularities")
    traces = parser.add_argument_group("requests of a trace")
    traces.add_argument(
        "--trace",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="in Mooncake's format; may be repeated",
    )
    traces.add_argument(
        "--divisor", type=int, default=32, metavar="N", help="prompts become so much shorter"
    )
    traces.add_argument("--max-prompt-len", type=int, default=448, metavar="TOKENS")
    parser.add_argument("--policy", action="append", metavar="NAME", help="only this one; repeat")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the figures here")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Returns 1 if a request failed."""
    _check(arguments)
    # Ray takes a second; `pageray --help` should not wait for it.
    from pageray.router.bench.routing_chart import draw_rows
    from pageray.router.bench.routing_policies import available_policies
    from pageray.router.bench.routing_testbed import CONFIG, MODEL, RoutingTestbed
    from pageray.router.ray_cluster import RayCluster

    # Ray's llm package, where its router lives, lets every library log what it does.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    loads = make_loads(arguments)
    policies, left_out = available_policies()
    policies = _chosen(policies, arguments.policy)
    settings = (f"engine_kwargs.num_gpu_blocks_override={arguments.blocks}",)
    cluster = RayCluster()
    try:
        cluster.start()
        testbed = RoutingTestbed(cluster, free_port(), arguments.replicas, settings)
        rows = _measure(testbed, loads, policies, arguments)
    finally:
        cluster.stop()
    _print(rows, left_out)
    if arguments.json is not None:
        report = {
            "model": MODEL,
            "config": CONFIG,
            "settings": _settings(arguments),
            "rows": [asdict(row) for row in rows],
            "left_out": left_out,
            "machine": describe_machine(),
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    if arguments.svg is not None:
        arguments.svg.parent.mkdir(parents=True, exist_ok=True)
        arguments.svg.write_text(draw_rows(rows))
    return 1 if any(row.failures for row in rows) else 0


def make_loads(arguments: argparse.Namespace) -> "list[RoutingLoad]":
    """The loads asked for, arrivals not yet scaled. Raises `ConfigError` for a bad trace."""
    from pageray.router.bench.mooncake_trace import TraceScale, read_trace, trace_load
    from pageray.router.bench.routing_load import SharedPrefixes

    loads: list[RoutingLoad] = []
    if arguments.groups:
        prefixes = SharedPrefixes(
            num_requests=arguments.requests,
            num_groups=arguments.groups,
            prefix_len=arguments.prefix_len,
            max_tail_len=arguments.max_tail_len,
            output_len=arguments.output_len,
            skew=arguments.skew,
            seed=arguments.seed,
        )
        loads.append(prefixes.load())
    scale = TraceScale(
        num_requests=arguments.requests,
        length_divisor=arguments.divisor,
        max_prompt_len=arguments.max_prompt_len,
        output_len=arguments.output_len,
        seed=arguments.seed,
    )
    loads += [trace_load(path.stem, read_trace(path), scale) for path in arguments.trace]
    if not loads:
        raise ConfigError("--groups is 0 and there is no --trace: no load is left.")
    return loads


def _measure(
    testbed: "RoutingTestbed",
    loads: "Sequence[RoutingLoad]",
    policies: "Sequence[RoutingPolicy]",
    arguments: argparse.Namespace,
) -> "list[RoutingRow]":
    from tqdm import tqdm

    from pageray.router.bench.routing_bench import measure_capacities, measure_policy

    num_runs = len(policies) + (arguments.rate is None)
    total = num_runs * sum(len(load.requests) for load in loads)
    rows: list[RoutingRow] = []
    with tqdm(total=total, unit="request", disable=not sys.stderr.isatty()) as bar:
        if arguments.rate is None:
            capacities = measure_capacities(testbed, loads, bar.update)
            rates = [arguments.utilization * capacity for capacity in capacities]
        else:
            rates = [arguments.rate] * len(loads)
        for load, rate in zip(loads, rates, strict=True):
            timed = load.at_rate(rate)
            for policy in policies:
                bar.set_description(f"{load.name}: {policy.name}")
                rows.append(measure_policy(testbed, timed, policy, bar.update))
    return rows


def _check(arguments: argparse.Namespace) -> None:
    for name in ("requests", "output_len", "replicas", "blocks", "max_tail_len", "divisor"):
        if vars(arguments)[name] < 1:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} is {vars(arguments)[name]}; it must be 1 or more.")
    if not 0.0 < arguments.utilization <= 1.0:
        raise ConfigError(
            f"--utilization is {arguments.utilization}; it must be above 0 and at most 1."
        )
    if arguments.rate is not None and not arguments.rate > 0.0:
        raise ConfigError(f"--rate is {arguments.rate}; it must be above 0.")


def _chosen(policies: "list[RoutingPolicy]", names: Sequence[str] | None) -> "list[RoutingPolicy]":
    known = {policy.name: policy for policy in policies}
    for name in names or ():
        if name not in known:
            raise ConfigError(f"--policy {name!r} is not here. There are: {', '.join(known)}.")
    return policies if names is None else [known[name] for name in names]


def _settings(arguments: argparse.Namespace) -> dict[str, object]:
    names = (
        "requests", "output_len", "replicas", "blocks", "utilization", "rate", "groups",
        "prefix_len", "max_tail_len", "skew", "divisor", "max_prompt_len", "seed",
    )  # fmt: skip
    return {name: vars(arguments)[name] for name in names}


def _print(rows: "Sequence[RoutingRow]", left_out: dict[str, str]) -> None:
    from rich.console import Console

    console = Console()
    for load in dict.fromkeys(row.load for row in rows):
        console.print(_table([row for row in rows if row.load == load]))
    for name, reason in left_out.items():
        console.print(f"left out: {name}: {reason}")
    for row in rows:
        if row.first_failure is not None:
            console.print(f"{row.load}, {row.policy}: {row.first_failure}")


def _table(rows: "Sequence[RoutingRow]") -> "Table":
    """Of one load."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    first = rows[0]
    table = Table(
        title=f"{first.load}: {first.requests} requests, {first.requests_per_s:.1f}/s, "
        f"{first.prompt_tokens:,} prompt tokens",
        caption=f"x opt.: prompt tokens computed, over the least possible "
        f"({first.optimum_tokens:,}); p50 to p99: first token, ms",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("policy", no_wrap=True)
    for column in ("tokens", "x opt.", "p50", "p90", "p99", "imbal.", "pulled", "failed"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.policy,
            str(row.prefill_tokens),
            f"{row.ratio:.2f}",
            *(f"{row.ttft_ms[p]:.0f}" for p in ("p50", "p90", "p99")),
            f"{row.imbalance:.2f}",
            str(row.pulled_blocks),
            str(row.failures),
        )
    return table
