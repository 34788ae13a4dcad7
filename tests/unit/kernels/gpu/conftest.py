"""Where the Triton kernels run: on a GPU, or on the CPU in Triton's interpreter."""

import os
from dataclasses import replace

import pytest
import torch

from triptych.kernels import Section

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Neither GPU nor interpreter: ``test_gpu.py`` starts the interpreter.

    Unlike tensor cores, numpy warns where a kernel multiplies garbage and then hides it.
    """
    skip = pytest.mark.skip(reason="no CUDA device, and not in Triton's interpreter")
    quiet = pytest.mark.filterwarnings("ignore:(invalid value|overflow|All-NaN):RuntimeWarning")
    for item in items:
        if item.path.parent.name == "gpu":
            item.add_marker(quiet)
            if not IS_INTERPRETED and not torch.cuda.is_available():
                item.add_marker(skip)


class Device:
    """Moves inputs to where the kernels run."""

    name = "cpu" if IS_INTERPRETED else "cuda"

    def take(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        return [tensor.to(self.name) for tensor in tensors]

    def section(self, section: Section) -> Section:
        pages, tokens = self.take(section.pages, section.tokens)
        return replace(section, pages=pages, tokens=tokens)


@pytest.fixture
def device() -> Device:
    return Device()
