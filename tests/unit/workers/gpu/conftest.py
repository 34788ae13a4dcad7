"""Where engines run as on a GPU: on one, or on the fake device with interpreted kernels."""

import os

import pytest

from triptych.workers.device import Device, device_for

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if IS_INTERPRETED:
    from tests.far import far, quick_far

    __all__ = ["far", "quick_far"]


@pytest.fixture(scope="session")
def quick_device(request: pytest.FixtureRequest) -> Device:
    """The same, without Triton where that means its interpreter."""
    return request.getfixturevalue("quick_far") if IS_INTERPRETED else device_for(1)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Device:
    """The GPU, or what stands in for it."""
    return request.getfixturevalue("far") if IS_INTERPRETED else device_for(1)
