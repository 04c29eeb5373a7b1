"""What `model` may be: an embedded name, a folder, a hub id; and what is said when it is none."""

import socket
from pathlib import Path

import pytest

from fake_hub import REPO_ID, fake_hub
from pageray.cluster.errors import ModelLoadError
from pageray.workers.model_store.hub import download_snapshot
from pageray.workers.model_store.resolve import resolve_model

HUB_FILES = {
    "config.json": b"{}",
    "generation_config.json": b"{}",
    "tokenizer.json": b"{}",
    "model-00001-of-00002.safetensors": b"first",
    "model-00002-of-00002.safetensors": b"second",
    "model.safetensors.index.json": b"{}",
    "consolidated.safetensors": b"the same again",
    "pytorch_model.bin": b"a pickle",
    "model.pt": b"a pickle",
    "training_args.pkl": b"a pickle",
    "README.md": b"# about",
    "onnx/config.json": b"{}",
}


def test_embedded_name(smollm2_folder: Path) -> None:
    assert resolve_model("SmolLM2-135M", progress=False) == smollm2_folder


def test_local_folder_is_itself(smollm2_folder: Path) -> None:
    assert resolve_model(str(smollm2_folder)) == smollm2_folder


def test_local_folder_that_lacks_files(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"no config\.json and no \*\.safetensors"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"it has no \*\.safetensors\."):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize(
    "source", ["", "gpt-5", "/no/such/folder", "./nothing", "a/b/c", "a/..", "~nobody/x"]
)
def test_neither_folder_nor_name(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelLoadError, match="smollm2-135m"):
        resolve_model(source)


def test_hub_download_takes_weights_and_settings_but_no_pickle(tmp_path: Path) -> None:
    with fake_hub(HUB_FILES) as endpoint:
        folder = download_snapshot(REPO_ID, endpoint=endpoint, cache_dir=tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    assert (folder / "model-00002-of-00002.safetensors").read_bytes() == b"second"


def test_model_that_the_hub_does_not_have(tmp_path: Path) -> None:
    with (
        fake_hub(HUB_FILES) as endpoint,
        pytest.raises(ModelLoadError, match=r"(?s)someone/other.*smollm2-135m"),
    ):
        download_snapshot("someone/other", endpoint=endpoint, cache_dir=tmp_path)


def test_hub_out_of_reach(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(ModelLoadError, match=r"(?s)'a/b'.*smollm2-135m"):
            download_snapshot("a/b", endpoint=endpoint, cache_dir=tmp_path)
