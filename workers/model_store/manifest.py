"""The manifest of a converted model: the last file written, and the proof that it is complete."""

from pathlib import Path

import msgspec

MANIFEST_NAME = "pageray_manifest.json"
FORMAT_VERSION = 1
"""Raise it when the conversion changes, so that folders made by older code are made anew."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a complete folder holds. `file_bytes` maps file name to size."""

    format_version: int
    source_sha256: str
    file_bytes: dict[str, int]


def write_manifest(folder: Path, source_sha256: str) -> None:
    """Describe every file that lies in `folder` now. Call it after all of them are written."""
    file_bytes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    manifest = Manifest(
        format_version=FORMAT_VERSION, source_sha256=source_sha256, file_bytes=file_bytes
    )
    (folder / MANIFEST_NAME).write_bytes(msgspec.json.encode(manifest))


def is_complete(folder: Path, source_sha256: str) -> bool:
    """Whether `folder` was made from this source by this code and no file is gone or cut short."""
    try:
        manifest = msgspec.json.decode((folder / MANIFEST_NAME).read_bytes(), type=Manifest)
        sizes = {name: (folder / name).stat().st_size for name in manifest.file_bytes}
    except (OSError, msgspec.DecodeError):
        return False
    return (
        manifest.format_version == FORMAT_VERSION
        and manifest.source_sha256 == source_sha256
        and sizes == manifest.file_bytes
    )
