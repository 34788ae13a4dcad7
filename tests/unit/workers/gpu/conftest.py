"""Where engines run as on a GPU: on one, or on the fake device with interpreted kernels."""

import os

import pytest
import torch

from triptych.workers.device import Device, device_for

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if IS_INTERPRETED:
    from tests.far import far, quick_far

    __all__ = ["far", "quick_far"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Neither GPU nor interpreter: ``test_gpu.py`` starts the interpreter."""
    skip = pytest.mark.skip(reason="no CUDA device, and not in Triton's interpreter")
    quiet = pytest.mark.filterwarnings("ignore:(invalid value|overflow|All-NaN):RuntimeWarning")
    for item in items:
        if item.path.parent.name == "gpu":
            item.add_marker(quiet)
            if not IS_INTERPRETED and not torch.cuda.is_available():
                item.add_marker(skip)


@pytest.fixture(scope="session")
def quick_device(request: pytest.FixtureRequest) -> Device:
    """The same, without Triton where that means its interpreter."""
    return request.getfixturevalue("quick_far") if IS_INTERPRETED else device_for(1)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Device:
    """The GPU, or what stands in for it."""
    return request.getfixturevalue("far") if IS_INTERPRETED else device_for(1)
