"""A stage that has more to do than its replicas can gets another one, while answers go on."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

GROW_S = 180.0
"""A bound, far beyond the half minute that it takes on a quiet machine."""


def test_decode_grows_when_requests_wait_for_its_slots(
    serving: Callable[..., AbstractContextManager[Any]],
) -> None:
    decode = {
        "max_batch_requests": 2,
        "actor": {"threads": 1},
        "autoscaling": {"max_replicas": 2, "upscale_delay_s": 0},
    }
    pool = {"capacity_bytes": 512 << 20, "prefix_bytes": 0}
    with serving(decode=decode, pool=pool) as server:
        assert len(server.replicas("Decode")) == 1
        prompts = [f"Once upon a time there were {index} sons." for index in range(6)]
        crowd = server.crowd(prompts, max_tokens=250)
        server.wait_until(lambda: len(server.replicas("Decode")) == 2, GROW_S)
        assert crowd.join() == {"length": len(prompts)}
