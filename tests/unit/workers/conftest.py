"""The tiny model, made once."""

from pathlib import Path

import pytest

from tests.tiny import save_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the tiny model."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))
