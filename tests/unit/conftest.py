"""The tiny model, and folders called ``gpu``: on a GPU, or on the CPU in Triton's interpreter."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.learned import save_networks
from tests.tiny import save_tiny_model
from triptych.workers.models.weights import shared_tiles

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Whether to pass over a folder ``gpu``: neither GPU nor interpreter.

    ``test_gpu.py`` starts the interpreter.
    """
    can_run = IS_INTERPRETED or torch.cuda.is_available()
    return True if collection_path.name == "gpu" and not can_run else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Unlike tensor cores, numpy warns where a kernel multiplies garbage and then hides it."""
    quiet = pytest.mark.filterwarnings("ignore:(invalid value|overflow|All-NaN):RuntimeWarning")
    for item in items:
        if item.path.parent.name == "gpu":
            item.add_marker(quiet)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the tiny model; files of learned networks for it are beside it."""
    model = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    save_networks(model)
    return model


@pytest.fixture(scope="session", autouse=True)
def _tiles_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Files of small models do not push those of real ones out of the user's cache."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_tiles, "writable_cache_dir", lambda: folder)
        yield
