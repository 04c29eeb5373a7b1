"""`pageray serve`: from a configuration to a server that answers, and down again."""

import argparse
import importlib
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from pageray.router.commands.subparsers import Subparsers
from pageray.router.config_file import DEFAULT_CONFIG
from pageray.router.http_port import check_port_is_free
from pageray.router.serve_plan import ServePlan, make_plan
from pageray.router.serving import start_serving
from pageray.workers.model_store.resolve import resolve_model


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("serve", help="run a configuration on this machine")
    parser.add_argument(
        "config",
        nargs="?",
        default=DEFAULT_CONFIG,
        help="a Serve YAML file or the name of a packaged one (default: %(default)s)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        help="change one value of the configuration, such as engine_kwargs.max_model_len=2048",
    )
    parser.add_argument("--host", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on (default: 8000)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM. Raises `PageRayError` when it cannot be started."""
    started_s = time.monotonic()
    plan = make_plan(arguments.config, arguments.set, arguments.host, arguments.port)
    signal.signal(signal.SIGTERM, _interrupt)
    # The models, Ray and the modules below come in parallel: each alone takes seconds.
    with ThreadPoolExecutor(max_workers=2) as executor:
        from pageray.router.ray_cluster import RayCluster

        cluster = RayCluster()
        if cluster.is_own:
            check_port_is_free(plan.host, plan.port)
        models = [executor.submit(resolve_model, source) for source in plan.model_sources]
        executor.submit(importlib.import_module, "pageray.router.builder")
        try:
            cluster.start()
            # Ray has put a handler of its own in place, which dumps stacks and aborts.
            signal.signal(signal.SIGTERM, _interrupt)
            start_serving(cluster, plan, models)
            _say_ready(plan, time.monotonic() - started_s)
            threading.Event().wait()
        except KeyboardInterrupt:
            print("Stopping.", file=sys.stderr)
        finally:
            cluster.stop()
    return 0


def _say_ready(plan: ServePlan, took_s: float) -> None:
    names = ", ".join(plan.model_ids)
    base = f"http://{plan.client_host}:{plan.port}"
    prefix = plan.applications[0].route_prefix.rstrip("/")
    print(f"PageRay ready: {names} at {base}{prefix}/v1 ({took_s:.1f} s)", flush=True)


def _interrupt(signal_number: int, frame: object) -> None:
    """SIGTERM is Ctrl-C: it unwinds start-up and waiting alike, through the same `finally`."""
    raise KeyboardInterrupt
