"""A decode worker on a GPU dies at any line of its code; what the arena has is enough to go on."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.workers.decode.test_resume import (
    DECODE,
    RETIREMENT,
    Stages,
    die_and_go_on,
    lines_of_a_run,
    uninterrupted,
)
from triptych.workers.device import Device


@pytest.fixture(scope="module", params=["diffkv", "selected", "over the bus"])
def stages(
    request: pytest.FixtureRequest, tiny_model: Path, quick_device: Device
) -> Iterator[Stages]:
    """In the last case copies of the pages have no room on the device."""
    is_far = request.param == "over the bus"
    with pytest.MonkeyPatch.context() as patch:
        if is_far:
            patch.setattr(type(quick_device), "free_bytes", 1000)
        policy = "diffkv" if is_far else request.param
        stages = Stages.of(tiny_model, policy, device=quick_device)
        assert stages.engines["decode"]._memory.is_copied != is_far
        yield stages


def test_the_next_worker_says_the_same_wherever_the_first_one_died(
    stages: Stages,
) -> None:
    whole, luck = uninterrupted(stages), random.Random(5)
    for files in (DECODE, RETIREMENT):
        total = lines_of_a_run(stages, files)
        die_and_go_on(stages, whole, luck.randrange(total), files)
