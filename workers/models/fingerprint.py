"""The identity of a model's KV: equal fingerprints may share pages, others never do."""

import hashlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO

import msgspec

from pageray.workers.models.safetensors_header import (
    SafetensorsHeader,
    read_header,
    weight_files,
)
from pageray.workers.models.spec import ModelSpec

_FORMAT = b"pageray-model-fingerprint-1"
_SAMPLE_BYTES = 4096

_WITHOUT_EFFECT_ON_KV = ("max_position", "tie_word_embeddings", "bos_token_id", "eos_token_ids")
"""They decide when a sequence ends and what is sampled, not what is written to the cache."""


def fingerprint(folder: Path, quantization: str = "none") -> str:
    """SHA-256, as 64 hexadecimal digits, of what decides the KV of a token sequence.

    Covered: every field of `ModelSpec` except `_WITHOUT_EFFECT_ON_KV` (so RoPE, windows, norms
    and biases), as canonical JSON; then for each safetensors file in name order its size, its
    whole header (names, dtypes, shapes, offsets) and, of every tensor, up to 4096 bytes from its
    middle. A fine-tune changes its tensors throughout, so a sample of each tensor finds it; a
    change confined to bytes between the samples is not found. Reading all bytes would take
    minutes for large models. Weights that are rounded as they are loaded make another model:
    `quantization` counts unless it is "none". Paths and time stamps do not count. Raises `ModelLoadError` as
    `ModelSpec.from_folder` and `read_header` do.
    """
    digest = hashlib.sha256(_FORMAT)
    digest.update(_canonical_config(ModelSpec.from_folder(folder)))
    for path in weight_files(folder):
        for part in _identifying_parts(read_header(path)):
            digest.update(part)
    if quantization != "none":
        digest.update(quantization.encode())
    return digest.hexdigest()


def _canonical_config(spec: ModelSpec) -> bytes:
    fields = {key: value for key, value in asdict(spec).items() if key not in _WITHOUT_EFFECT_ON_KV}
    return msgspec.json.encode(fields, order="sorted")


def _identifying_parts(header: SafetensorsHeader) -> Iterator[bytes]:
    yield header.file_bytes.to_bytes(8, "little")
    yield header.raw
    with header.path.open("rb") as stream:
        for name in sorted(header.tensors):
            start, end = header.tensors[name].data_offsets
            yield _middle(stream, header.data_start + start, header.data_start + end)


def _middle(stream: BinaryIO, start: int, end: int) -> bytes:
    """Up to `_SAMPLE_BYTES` from the middle of the file's bytes start .. end - 1."""
    length = min(_SAMPLE_BYTES, end - start)
    stream.seek(start + (end - start - length) // 2)
    return stream.read(length)
