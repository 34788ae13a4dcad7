"""Profiles a worker while it serves (``triptych profile --url``)."""

import asyncio
import time
from collections.abc import Sequence

from triptych.core.messages import Stage
from triptych.workers.loop import StageLoop
from triptych.workers.profiling.profiler import Profiler
from triptych.workers.profiling.report import report_of, trace_events

POLL_INTERVAL_S = 0.05

Json = dict[str, object]


class LiveProfiler:
    """Takes profiles of one worker, one at a time."""

    def __init__(self, stages: Sequence[Stage], weight_bytes: int) -> None:
        """``weight_bytes``: bytes of weights that a forward pass reads."""
        self._stages, self._weight_bytes = stages, weight_bytes
        self._is_busy = False

    async def profile(
        self, name: str, loop: StageLoop, steps: int, seconds: float, *, trace: bool
    ) -> Json | None:
        """Profile the next ``steps`` steps of each stage, or as many as run in ``seconds``.

        Times are Unix times, so that profiles of several workers have one time axis.

        Returns: a ``ProfileReport`` as JSON, with its events if ``trace``; None while another
            profile is being taken
        """
        if self._is_busy:
            return None
        self._is_busy = True
        try:
            profiler = await asyncio.to_thread(self._record, loop, steps, seconds)
        finally:
            self._is_busy = False
        return await asyncio.to_thread(self._report, name, profiler, trace)

    def _record(self, loop: StageLoop, steps: int, seconds: float) -> Profiler:
        profiler, until = Profiler(steps), time.monotonic() + seconds
        with loop.instrumented(profiler.around):
            while not all(map(profiler.is_full, self._stages)) and time.monotonic() < until:
                time.sleep(POLL_INTERVAL_S)
        return profiler

    def _report(self, name: str, profiler: Profiler, trace: bool) -> Json:
        steps, origin_s = list(profiler.steps), time.perf_counter() - time.time()
        report: Json = {"worker": name, "stages": list(self._stages)}
        report |= report_of(steps, self._weight_bytes, origin_s).as_json()
        return report | {"trace": trace_events(steps, origin_s) if trace else []}
