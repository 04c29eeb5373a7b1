"""Puts tests/support on the path: helpers are imported by their own names."""

import sys
from pathlib import Path

import pageray  # noqa: F401  # before torch: it sets how OpenMP waits

sys.path.insert(0, str(Path(__file__).parent / "support"))
