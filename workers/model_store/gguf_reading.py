"""Typed access to the metadata of a GGUF file."""

from pathlib import Path
from typing import cast

from gguf import GGUFReader

from pageray.cluster.errors import ModelLoadError


class GgufMetadata:
    """The key-value fields of a GGUF file, each read as the type the caller expects.

    Every method raises `ModelLoadError` when the field is absent or of another type.
    """

    def __init__(self, reader: GGUFReader, path: Path) -> None:
        self._reader = reader
        self._path = path

    def integer(self, key: str) -> int:
        value = self._content(key)
        if not isinstance(value, int):
            raise self._wrong_type(key, "an integer", value)
        return value

    def number(self, key: str) -> float:
        value = self._content(key)
        if not isinstance(value, int | float):
            raise self._wrong_type(key, "a number", value)
        # GGUF keeps float32: 1e-5 comes back as 9.99999975e-06. Seven digits restore it.
        return float(f"{value:.7g}")

    def text(self, key: str) -> str:
        value = self._content(key)
        if not isinstance(value, str):
            raise self._wrong_type(key, "a string", value)
        return value

    def texts(self, key: str) -> list[str]:
        return [str(item) for item in self._items(key)]

    def integers(self, key: str) -> list[int]:
        return [int(str(item)) for item in self._items(key)]

    def _items(self, key: str) -> list[object]:
        value = self._content(key)
        if not isinstance(value, list):
            raise self._wrong_type(key, "an array", value)
        return cast("list[object]", value)

    def _content(self, key: str) -> object:
        field = self._reader.get_field(key)
        if field is None:
            raise ModelLoadError(f"{self._path.name} has no field {key!r}.")
        content: object = field.contents()
        return content

    def _wrong_type(self, key: str, expected: str, value: object) -> ModelLoadError:
        return ModelLoadError(
            f"{self._path.name}: field {key!r} should be {expected}, is {type(value).__name__}."
        )
