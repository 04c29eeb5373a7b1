"""Downloads a model from the Hugging Face hub: weights as safetensors, never pickles."""

from pathlib import Path

import huggingface_hub

# The hub client's HTTP library changes between its versions; under this name each has its error.
from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage]

from pageray.cluster.errors import ModelLoadError
from pageray.workers.model_store.embedded import embedded_names

WANTED_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
"""A pickle runs code when it is opened, so no pattern here matches one."""

ETAG_TIMEOUT_S = 10.0


def download_snapshot(
    repo_id: str,
    revision: str | None = None,
    *,
    endpoint: str | None = None,
    cache_dir: Path | None = None,
) -> Path:
    """The local folder of a hub model's files that match `WANTED_FILES`, downloaded as needed.

    A model already in the cache is found without the network. `endpoint` and `cache_dir` default
    to the hub client's own settings. Raises `ModelLoadError` when the hub cannot be reached, refuses, or
    has no such model.
    """
    try:
        folder = huggingface_hub.snapshot_download(
            repo_id,
            revision=revision,
            endpoint=endpoint,
            cache_dir=cache_dir,
            allow_patterns=list(WANTED_FILES),
            # Other formats of the same weights: onnx/, original/, Mistral's consolidated files.
            ignore_patterns=["*/*", "consolidated*"],
            etag_timeout=ETAG_TIMEOUT_S,
        )
    except (OSError, ValueError, HTTPError) as error:
        raise ModelLoadError(
            f"Model {repo_id!r} (revision {revision or 'main'}) could not be got from the hub: "
            f"{type(error).__name__}: {error}. Give a local folder, or one of the embedded models "
            f"that need no hub: {embedded_names()}."
        ) from error
    return Path(folder)
