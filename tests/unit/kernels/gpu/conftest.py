"""Fixtures of the device of Triton kernels: a GPU, or the CPU in Triton's interpreter."""

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.interpreter import round_to_nearest
from triptych.kernels import Section
from triptych.kernels.triton.launch import planned_for

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if IS_INTERPRETED:
    round_to_nearest()


class Device:
    """Copies inputs to the device of the kernels."""

    name = "cpu" if IS_INTERPRETED else "cuda"

    def take(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        return [tensor.to(self.name) for tensor in tensors]

    def section(self, section: Section) -> Section:
        pages, tokens = self.take(section.pages, section.tokens)
        return replace(section, pages=pages, tokens=tokens)


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def amd() -> Iterator[None]:
    """Launches are planned as for a GPU of AMD, which has tiles of its own."""
    with planned_for("gfx942"):
        yield
