"""The embedded model's tokenizer files; its weights are not loaded here."""

from pathlib import Path

import pytest

from pageray.router.tokenizer import Tokenizer
from pageray.workers.model_store.resolve import resolve_model


@pytest.fixture(scope="session")
def model_folder() -> Path:
    return resolve_model("smollm2-135m", progress=False)


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(model_folder)
