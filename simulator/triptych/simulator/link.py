"""The link over which a worker fetches pages of other nodes, in virtual time."""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from triptych.kvpool.transfer.link_meter import LinkMeter
from triptych.simulator.clock import Clock

LinkSteps = Sequence[tuple[float, float]]
"""Bytes per second of a link from a time on, in the order of time; empty: pages travel at once."""


class SimulatedLink:
    """Transfers one request's pages after the other, and measures as a worker does."""

    def __init__(self, clock: Clock, steps: LinkSteps) -> None:
        self._clock, self._steps = clock, steps
        self.meter = LinkMeter(lambda: clock.now)
        self._queue = deque[tuple[int, Callable[[], None]]]()
        self._transfer: ExitStack | None = None

    def fetch(self, count: int, then: Callable[[], None]) -> None:
        """Call ``then`` when ``count`` bytes have arrived, behind those that are on their way."""
        self._queue.append((count, then))
        if self._transfer is None:
            self._begin()

    def _begin(self) -> None:
        count, _ = self._queue[0]
        self._transfer = ExitStack()
        self._transfer.enter_context(self.meter.transfer())
        speed = [speed for since, speed in self._steps if since <= self._clock.now][-1]
        self._clock.after(count / speed, self._end)

    def _end(self) -> None:
        count, then = self._queue.popleft()
        assert self._transfer is not None
        self.meter.arrived(count)
        self._transfer.close()
        self._transfer = None
        if self._queue:
            self._begin()
        then()
