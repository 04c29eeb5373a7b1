"""Finds the folder with a model's tokenizer, without fetching weights where that can be helped."""

from pathlib import Path

from pageray.cluster.errors import ModelLoadError
from pageray.workers.model_store.embedded import find_embedded
from pageray.workers.model_store.fetch import fetch_embedded

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)


def resolve_tokenizer_folder(source: str) -> Path:
    """The folder that `source` (a folder, an embedded model or a hub id) names.

    Blocks while it downloads. Raises `ModelLoadError` when it cannot be had.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    if find_embedded(source) is not None:
        return fetch_embedded(source, progress=False)
    return _download_tokenizer(source)


def _download_tokenizer(hub_id: str) -> Path:
    # These imports cost a second that folders and embedded models need not pay.
    import huggingface_hub
    from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage]

    try:
        return Path(
            huggingface_hub.snapshot_download(hub_id, allow_patterns=list(_TOKENIZER_FILES))
        )
    except (OSError, ValueError, HTTPError) as error:
        raise ModelLoadError(
            f"The tokenizer of {hub_id!r} could not be got from the hub: {error}. "
            "Give a local folder as tokenizer_source."
        ) from error
