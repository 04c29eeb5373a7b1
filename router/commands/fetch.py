"""`pageray fetch`: get a model before it is needed."""

import argparse

from pageray.router.commands.subparsers import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("fetch", help="download a model and print its folder")
    parser.add_argument("name", help="an embedded model's name (smollm2-135m) or a hub id")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Raises `ModelLoadError` when the model cannot be had."""
    # Imported here: other commands must not pay for it.
    from pageray.workers.model_store.resolve import resolve_model

    print(resolve_model(str(arguments.name)))
    return 0
