"""A worker that is looked on while it serves (``triptych profile --url``)."""

import asyncio
import time
from collections.abc import Sequence

from triptych.core.messages import Stage
from triptych.workers.loop import StageLoop
from triptych.workers.profiling.profiler import Profiler
from triptych.workers.profiling.report import report_of, trace_events

LOOK_EVERY_S = 0.05

Json = dict[str, object]


class LiveProfiler:
    """Takes one profile of a worker at a time."""

    def __init__(self, stages: Sequence[Stage], weight_bytes: int) -> None:
        """``weight_bytes`` are those that a forward pass reads."""
        self._stages, self._weight_bytes = stages, weight_bytes
        self._is_busy = False

    async def look_on(
        self, name: str, loop: StageLoop, steps: int, seconds: float, *, trace: bool
    ) -> Json | None:
        """What ``steps`` steps of each stage are made of, or those of ``seconds`` seconds.

        Times are of the Unix epoch, so that those of several workers can be laid side by side.

        Returns: a ``ProfileReport`` as JSON, and with ``trace`` its events; None while another
            profile is taken
        """
        if self._is_busy:
            return None
        self._is_busy = True
        try:
            profiler = await asyncio.to_thread(self._look_on, loop, steps, seconds)
        finally:
            self._is_busy = False
        return await asyncio.to_thread(self._told, name, profiler, trace)

    def _look_on(self, loop: StageLoop, steps: int, seconds: float) -> Profiler:
        profiler, until = Profiler(steps), time.monotonic() + seconds
        with loop.instrumented(profiler.around):
            while not all(map(profiler.is_full, self._stages)) and time.monotonic() < until:
                time.sleep(LOOK_EVERY_S)
        return profiler

    def _told(self, name: str, profiler: Profiler, trace: bool) -> Json:
        steps, origin_s = list(profiler.steps), time.perf_counter() - time.time()
        told: Json = {"worker": name, "stages": list(self._stages)}
        told |= report_of(steps, self._weight_bytes, origin_s).as_json()
        return told | {"trace": trace_events(steps, origin_s) if trace else []}
