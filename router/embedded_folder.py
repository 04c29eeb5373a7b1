"""The folder of an embedded model, found without the libraries that make it."""

from pathlib import Path

from pageray.workers.model_store.cache_folder import default_cache_dir
from pageray.workers.model_store.embedded import find_embedded
from pageray.workers.model_store.manifest import is_complete


def find_embedded_folder(source: str) -> Path | None:
    """The folder if `source` names an embedded model that has been fetched, else None.

    `fetch_embedded` gives the same answer, but importing it imports torch: seconds of start-up in
    processes that have no other use for it.
    """
    model = find_embedded(source)
    if model is None:
        return None
    folder = default_cache_dir() / "models" / model.folder_name
    return folder if is_complete(folder, model.wheel_sha256) else None
