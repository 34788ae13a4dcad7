"""Looking on at a worker that serves."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from triptych.core.messages import Send
from triptych.deployments.monitoring.live_profiler import LiveProfiler
from triptych.workers.core_scheduler import SharedCores
from triptych.workers.loop import StageLoop


def ignore(_sends: Sequence[Send]) -> None:
    """Nothing is said here."""


async def test_one_profile_is_taken_at_a_time(tmp_path: Path) -> None:
    loop, live_profiler = (
        StageLoop("w", [], ignore, SharedCores(tmp_path)),
        LiveProfiler(("decode",), 7),
    )
    told = await asyncio.gather(
        *(live_profiler.profile("w", loop, 5, 0.2, trace=True) for _ in range(2))
    )
    assert [one is None for one in told] == [False, True]
    later = await live_profiler.profile("w", loop, 5, 0.01, trace=True)
    assert later == {
        "worker": "w",
        "stages": ["decode"],
        "parts": [],
        "layers": [],
        "steps": [],
        "trace": [],
    }
