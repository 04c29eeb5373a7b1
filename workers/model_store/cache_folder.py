"""Where fetched models lie on disk. The only place of the model store that reads the environment."""

import os
from pathlib import Path

CACHE_VARIABLE = "PAGERAY_CACHE"


def default_cache_dir() -> Path:
    """`$PAGERAY_CACHE` if it is set and not empty, else `~/.cache/pageray`. Creates nothing."""
    configured = os.environ.get(CACHE_VARIABLE, "")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "pageray"
