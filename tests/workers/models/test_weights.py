"""`Checkpoint` reads exactly the slice asked for and refuses damaged or foreign files."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from pageray.cluster.errors import ModelLoadError
from pageray.workers.models.weights import Checkpoint

CPU = torch.device("cpu")
MATRIX = torch.arange(24, dtype=torch.float32).view(6, 4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tensors = {"matrix": MATRIX, "vector": torch.arange(5.0), "count": torch.tensor([1, 2])}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def test_slices_of_rows_and_columns(folder: Path) -> None:
    with Checkpoint(folder, torch.float32, CPU) as checkpoint:
        assert checkpoint.read("matrix", (6, 4)).equal(MATRIX)
        assert checkpoint.read("matrix", (6, 4), rows=(1, 3)).equal(MATRIX[1:3])
        assert checkpoint.read("matrix", (6, 4), columns=(2, 4)).equal(MATRIX[:, 2:4])
        assert checkpoint.read("vector", (5,), rows=(3, 5)).tolist() == [3.0, 4.0]
        assert checkpoint.read("matrix", (6, 4), rows=(6, 6)).shape == (0, 4)


def test_converts_to_the_dtype_asked_for_and_owns_its_memory(folder: Path) -> None:
    with Checkpoint(folder, torch.bfloat16, CPU) as checkpoint:
        part = checkpoint.read("matrix", (6, 4), rows=(0, 2))
    assert part.dtype == torch.bfloat16
    assert part.untyped_storage().nbytes() == 2 * 4 * 2


def test_missing_tensor(folder: Path) -> None:
    with (
        Checkpoint(folder, torch.float32, CPU) as checkpoint,
        pytest.raises(ModelLoadError, match=r"no tensor 'other' \(expected shape \[3\]\)"),
    ):
        checkpoint.read("other", (3,))


def test_wrong_shape_names_both(folder: Path) -> None:
    with (
        Checkpoint(folder, torch.float32, CPU) as checkpoint,
        pytest.raises(ModelLoadError, match=r"\[6, 4\].*\[4, 6\]"),
    ):
        checkpoint.read("matrix", (4, 6))


def test_integer_weights_are_refused(folder: Path) -> None:
    with (
        Checkpoint(folder, torch.float32, CPU) as checkpoint,
        pytest.raises(ModelLoadError, match="I64"),
    ):
        checkpoint.read("count", (2,))


@pytest.mark.parametrize("keep", [0, 5, 40, -1])
def test_truncated_file(folder: Path, keep: int) -> None:
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:keep])
    with pytest.raises(ModelLoadError, match=f"has {len(content[:keep])} bytes"):
        Checkpoint(folder, torch.float32, CPU)


def test_file_that_is_no_safetensors(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"[]")
    with pytest.raises(ModelLoadError, match="malformed"):
        Checkpoint(folder, torch.float32, CPU)


def test_shards_are_found_through_the_index(folder: Path) -> None:
    safetensors.torch.save_file({"extra": torch.ones(1)}, folder / "second.safetensors")
    safetensors.torch.save_file({"vector": torch.zeros(5)}, folder / "unlisted.safetensors")
    weight_map = {"vector": "model.safetensors", "extra": "second.safetensors"}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with Checkpoint(folder, torch.float32, CPU) as checkpoint:
        assert checkpoint.read("extra", (1,)).tolist() == [1.0]
        assert checkpoint.read("vector", (5,)).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_missing_shard_is_named(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"vector": "gone.safetensors"}}))
    with pytest.raises(ModelLoadError, match=r"gone\.safetensors"):
        Checkpoint(folder, torch.float32, CPU)


def test_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="lacks weight files"):
        Checkpoint(tmp_path, torch.float32, CPU)
