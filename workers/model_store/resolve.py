"""Turns what a user writes under `model` into a folder that can be loaded."""

import os
import re
from pathlib import Path

from pageray.cluster.errors import ModelLoadError
from pageray.workers.model_store.embedded import embedded_names, find_embedded
from pageray.workers.model_store.fetch import fetch_embedded

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_model(
    source: str,
    *,
    cache_dir: Path | None = None,
    revision: str | None = None,
    progress: bool = True,
) -> Path:
    """The folder of a model: an embedded model's name, a local folder, or a hub id, in that order.

    `cache_dir` is where embedded models are kept (see `fetch_embedded`); a hub model goes to the
    hub client's own cache. `revision` is a branch, tag or commit of a hub model. The folder
    returned holds config.json and safetensors. Raises `ModelLoadError` otherwise.
    """
    if find_embedded(source) is not None:
        return fetch_embedded(source, cache_dir, progress)
    # Not Path.expanduser, which raises where there is no such user.
    folder = Path(os.path.expanduser(source))
    # An empty name would be the current folder.
    if source and folder.is_dir():
        return require_model_folder(folder)
    if _HUB_ID.fullmatch(source) is None:
        raise ModelLoadError(
            f"Model {source!r} is neither a folder, nor a hub id (owner/name), nor an embedded "
            f"model ({embedded_names()})."
        )
    from pageray.workers.model_store.hub import download_snapshot  # slow to import, seldom needed

    return require_model_folder(download_snapshot(source, revision))


def require_model_folder(folder: Path) -> Path:
    """`folder` itself. Raises `ModelLoadError` that says which of the needed files is missing."""
    missing: list[str] = []
    if not (folder / "config.json").is_file():
        missing.append("config.json")
    if not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise ModelLoadError(
            f"{folder} is not a loadable model folder: it has no {' and no '.join(missing)}. "
            "Pickled weights (.bin, .pt) are not read; convert them to safetensors."
        )
    return folder
