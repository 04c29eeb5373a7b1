"""Reads from safetensors the part of each weight that one rank holds, and nothing more."""

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, cast

import safetensors
import torch
from torch import Tensor

from pageray.cluster.errors import ModelLoadError
from pageray.workers.models.safetensors_header import TensorEntry, read_header, weight_files

_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")


class _Slice(Protocol):
    def __getitem__(self, index: tuple[slice, ...]) -> Tensor: ...


class _OpenFile(Protocol):
    def get_slice(self, name: str) -> _Slice: ...


@dataclass(frozen=True)
class _Location:
    path: Path
    entry: TensorEntry


class Checkpoint:
    """The weights of a model folder, read slice by slice in one dtype onto one device.

    A context manager: files are mapped while it is open. Raises `ModelLoadError` at construction
    for files that are missing, damaged or cut short.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._folder = folder
        self._dtype = dtype
        self._device = device
        self._locations = {
            name: _Location(header.path, entry)
            for header in map(read_header, weight_files(folder))
            for name, entry in header.tensors.items()
        }
        self._files: dict[Path, _OpenFile] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Letting go of a file unmaps it.
        self._files.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._locations

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
    ) -> Tensor:
        """A new tensor: tensor `name`, or its rows [start, end) (dim 0) and columns (dim 1).

        `shape` is what the whole tensor must have. Raises `ModelLoadError` when the tensor is
        missing, of another shape, or not of a floating-point dtype.
        """
        location = self._locations.get(name)
        if location is None:
            raise ModelLoadError(
                f"{self._folder} has no tensor {name!r} (expected shape {list(shape)}); it holds "
                f"{len(self._locations)} tensors."
            )
        entry = location.entry
        if entry.shape != shape:
            raise ModelLoadError(
                f"Tensor {name!r} in {location.path} has shape {list(entry.shape)}; config.json "
                f"implies {list(shape)}."
            )
        if entry.dtype not in _FLOAT_DTYPES:
            raise ModelLoadError(
                f"Tensor {name!r} in {location.path} has dtype {entry.dtype}; "
                f"{', '.join(_FLOAT_DTYPES)} are supported."
            )
        cuts = [slice(*(rows or (0, shape[0])))]
        if len(shape) > 1:
            cuts.append(slice(*(columns or (0, shape[1]))))
        part = self._open(location.path).get_slice(name)[tuple(cuts)]
        # Copied even when nothing is converted: a mapped file may change or vanish under us.
        return part.to(device=self._device, dtype=self._dtype, copy=True)

    def _open(self, path: Path) -> _OpenFile:
        if path not in self._files:
            opened = safetensors.safe_open(str(path), framework="pt", device="cpu")
            self._files[path] = cast("_OpenFile", opened)
        return self._files[path]
