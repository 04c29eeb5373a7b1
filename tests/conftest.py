"""Puts tests/support on the path: helpers are imported by their own names."""

import sys
from pathlib import Path

# Before torch: it sets how OpenMP waits.
import pageray  # noqa: F401  # pyright: ignore[reportUnusedImport]

sys.path.insert(0, str(Path(__file__).parent / "support"))
