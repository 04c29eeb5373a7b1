"""Fixtures for tests that run a real model."""

from pathlib import Path

import pytest

from pageray.workers.model_store.fetch import fetch_embedded


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """SmolLM2-135M-Instruct, from the user's cache or fetched into it."""
    return fetch_embedded("smollm2-135m", progress=False)
