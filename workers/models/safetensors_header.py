"""The header of a safetensors file: which tensors it holds, and where.

Format: 8 bytes little-endian header length, a JSON header, then the tensors' bytes.
"""

import struct
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pageray.cluster.errors import ModelLoadError

_LENGTH_BYTES = 8
_METADATA_KEY = "__metadata__"
INDEX_NAME = "model.safetensors.index.json"


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor: its dtype's short name, its shape, and its bytes' range after the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True)
class SafetensorsHeader:
    """`raw` is the JSON header as it stands in the file; tensors' bytes start at `data_start`."""

    path: Path
    raw: bytes
    tensors: dict[str, TensorEntry]
    data_start: int
    file_bytes: int


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a model, sorted by name.

    With an index these are the files it names. Raises `ModelLoadError` when one is missing, or
    when there is none at all.
    """
    index_path = folder / INDEX_NAME
    if index_path.is_file():
        try:
            index = msgspec.json.decode(index_path.read_bytes(), type=_Index)
        except msgspec.DecodeError as error:
            raise ModelLoadError(f"{index_path}: {error}.") from error
        files = sorted(folder / name for name in set(index.weight_map.values()))
    else:
        files = sorted(folder.glob("*.safetensors"))
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        raise ModelLoadError(
            f"{folder} lacks weight files: {', '.join(missing) or '*.safetensors'}."
        )
    return tuple(files)


def read_header(path: Path) -> SafetensorsHeader:
    """Read and check the header. Raises `ModelLoadError` when the file is no safetensors file, or
    is shorter or longer than its header says."""
    file_bytes = path.stat().st_size
    with path.open("rb") as stream:
        prefix = stream.read(_LENGTH_BYTES)
        header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == _LENGTH_BYTES else None
        if header_bytes is None or header_bytes > file_bytes - _LENGTH_BYTES:
            raise ModelLoadError(
                f"{path} is no safetensors file, or is cut short: it has {file_bytes} bytes and a "
                f"header of {header_bytes} bytes."
            )
        raw = stream.read(header_bytes)
    try:
        entries = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        entries.pop(_METADATA_KEY, None)
        tensors = {
            name: msgspec.json.decode(entry, type=TensorEntry) for name, entry in entries.items()
        }
    except msgspec.DecodeError as error:
        raise ModelLoadError(f"{path} has a malformed safetensors header: {error}.") from error
    data_start = _LENGTH_BYTES + header_bytes
    expected = data_start + max((entry.data_offsets[1] for entry in tensors.values()), default=0)
    if file_bytes != expected:
        raise ModelLoadError(
            f"{path} has {file_bytes} bytes, its header says {expected}: the file is damaged. "
            "Get it again."
        )
    return SafetensorsHeader(path, raw, tensors, data_start, file_bytes)
