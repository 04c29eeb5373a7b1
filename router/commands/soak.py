"""`pageray soak`: a cluster under load whose processes are killed at random, and every answer
compared with that of a calm run."""

import argparse
import asyncio
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pageray.router.commands.subparsers import Subparsers
from pageray.router.http_port import free_port

if TYPE_CHECKING:
    from pageray.router.soak.load import Tally

NUM_REPLICAS = 2
NUM_CLIENTS = 6
STALL_S = 10.0
"""A step that takes longer than this is taken for a rank that hangs."""
_CONFIG = "cpu-2x1"
_OVERRIDES = (
    "engine_kwargs.dtype=float32",
    f"engine_kwargs.step_timeout_s={STALL_S}",
    # Small enough that sequences are preempted and pages evicted now and then.
    "engine_kwargs.num_gpu_blocks_override=160",
    "engine_kwargs.max_model_len=1024",
)


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("soak", help="kill parts of a cluster under load, and compare")
    parser.add_argument("--minutes", type=float, default=10.0, help="of load (default: 10)")
    parser.add_argument("--pause-s", type=float, default=15.0, help="mean time between two kills")
    parser.add_argument("--questions", type=int, default=24, help="different ones (default: 24)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Returns 1 if an answer was wrong or something is still held at the end."""
    from pageray.router.ray_cluster import RayCluster
    from pageray.router.serve_plan import make_plan
    from pageray.router.serving import start_serving

    plan = make_plan(_CONFIG, _OVERRIDES, None, free_port())
    cluster = RayCluster()
    try:
        cluster.start()
        start_serving(cluster, plan)
        result = asyncio.run(_soak(arguments, plan.client_host, plan.port))
    finally:
        cluster.stop()
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(result)))
    return 0 if result["is_good"] else 1


async def _soak(arguments: argparse.Namespace, host: str, port: int) -> dict[str, object]:
    from tqdm import tqdm

    from pageray.router.bench.machine import describe_machine
    from pageray.router.builder import deployment_name
    from pageray.router.soak.audit import wait_until_idle
    from pageray.router.soak.load import Client, Load, make_questions
    from pageray.router.soak.victims import Victim, strike

    rng = random.Random(arguments.seed)
    client = Client(f"http://{host}:{port}", "smollm2-135m")
    questions = make_questions(rng, arguments.questions)
    answers = {
        question: await client.ask(question)
        for question in tqdm(questions, desc="calm run", unit="answer")
    }
    kills = {victim.value: 0 for victim in Victim}
    load = Load(client, answers, NUM_CLIENTS)
    seconds = 60 * arguments.minutes
    started_s = time.monotonic()
    with tqdm(total=round(seconds), desc="soak", unit="s") as bar:
        next_kill_s = arguments.pause_s / 2
        while (elapsed_s := time.monotonic() - started_s) < seconds:
            if elapsed_s >= next_kill_s:
                victim = rng.choice(list(Victim))
                if strike(victim, "llm_app", rng) is not None:
                    kills[victim.value] += 1
                next_kill_s = elapsed_s + rng.uniform(0.3, 1.7) * arguments.pause_s
            bar.update(round(elapsed_s) - bar.n)
            bar.set_postfix(
                right=load.tally.num_right,
                refused=load.tally.num_refused,
                wrong=len(load.tally.wrong),
                kills=sum(kills.values()),
            )
            await asyncio.sleep(0.5)
    await load.stop()
    await client.close()
    complaints = await wait_until_idle("llm_app", deployment_name("smollm2-135m"), NUM_REPLICAS)
    _print(load.tally, kills, complaints)
    return {
        "is_good": not load.tally.wrong and not complaints and load.tally.num_right > 0,
        "minutes": arguments.minutes,
        "seed": arguments.seed,
        "kills": kills,
        "num_right": load.tally.num_right,
        "num_refused": load.tally.num_refused,
        "refusals": dict(load.tally.errors),
        "wrong": load.tally.wrong,
        "complaints": complaints,
        "machine": describe_machine(),
    }


def _print(tally: "Tally", kills: dict[str, int], complaints: list[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="soak")
    table.add_column("what")
    table.add_column("count", justify="right")
    for kind, count in kills.items():
        table.add_row(f"killed: {kind}", str(count))
    table.add_row("right answers", str(tally.num_right))
    table.add_row("refused with an error", str(tally.num_refused))
    table.add_row("wrong answers", str(len(tally.wrong)))
    console = Console()
    console.print(table)
    for line in [*tally.wrong[:10], *complaints]:
        console.print(line)
