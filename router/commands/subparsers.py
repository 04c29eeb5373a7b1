"""The type of what `ArgumentParser.add_subparsers` returns, which argparse keeps private."""

import argparse
from typing import Protocol


class Subparsers(Protocol):
    def add_parser(self, name: str, *, help: str = ...) -> argparse.ArgumentParser: ...
