"""The fingerprint changes with whatever changes KV, and with nothing else."""

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch

from model_folder import llama_config, save_small_model
from pageray.workers.models.fingerprint import fingerprint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_small_model(tmp_path / "model", llama_config())
    return tmp_path / "model"


def set_config(folder: Path, key: str, value: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))


def test_a_copy_elsewhere_has_the_same_fingerprint(folder: Path, tmp_path: Path) -> None:
    first = fingerprint(folder)
    assert len(bytes.fromhex(first)) == 32
    assert fingerprint(Path(shutil.copytree(folder, tmp_path / "copy"))) == first


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_parameters", {"rope_type": "default", "rope_theta": 10_001.0}),
        ("rope_parameters", {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}),
        ("rms_norm_eps", 1e-4),
        ("num_key_value_heads", 2),
    ],
)
def test_settings_that_change_kv_change_it(folder: Path, key: str, value: object) -> None:
    before = fingerprint(folder)
    set_config(folder, key, value)
    assert fingerprint(folder) != before


@pytest.mark.parametrize(
    ("key", "value"), [("eos_token_id", 9), ("max_position_embeddings", 32), ("note", "x")]
)
def test_settings_without_effect_on_kv_do_not(folder: Path, key: str, value: object) -> None:
    before = fingerprint(folder)
    set_config(folder, key, value)
    assert fingerprint(folder) == before


def test_other_weights_of_the_same_shapes_change_it(folder: Path, tmp_path: Path) -> None:
    save_small_model(tmp_path / "other", llama_config(), seed=1)
    assert fingerprint(tmp_path / "other") != fingerprint(folder)


def test_one_changed_tensor_changes_it(folder: Path) -> None:
    before = fingerprint(folder)
    file = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    tensors["model.layers.1.self_attn.k_proj.weight"] *= 1.001
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    assert fingerprint(folder) != before


def test_weights_rounded_at_loading_make_another_model(folder: Path) -> None:
    assert fingerprint(folder, "int8") != fingerprint(folder)
    assert fingerprint(folder, "none") == fingerprint(folder)
