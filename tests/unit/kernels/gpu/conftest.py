"""Where the Triton kernels run: on a GPU, or on the CPU in Triton's interpreter."""

import os
from dataclasses import replace

import pytest
import torch

from triptych.kernels import Section

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


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
