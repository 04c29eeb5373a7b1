"""The `pageray` command."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import cast

import pageray
from pageray.cluster.errors import PageRayError
from pageray.router.commands import bench, fetch, serve, simulate, soak

Command = Callable[[argparse.Namespace], int]
"""What a parser's default `run` is: does the work, returns the exit status."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv` (default: the process's arguments); returns the exit status.

    A deliberate error is one line on stderr; a bug keeps its traceback.
    """
    arguments = build_parser().parse_args(argv)
    run = cast(Command, arguments.run)
    try:
        return run(arguments)
    except PageRayError as error:
        print(f"pageray: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pageray", description=pageray.__doc__)
    parser.add_argument("--version", action="version", version=pageray.__version__)
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in (serve, fetch, bench, soak, simulate):
        module.add_parser(subparsers)
    return parser


if __name__ == "__main__":
    sys.exit(main())
