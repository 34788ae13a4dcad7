# pyright: basic
# numba is untyped.
"""Seconds that this process spends in compiling kernels.

numba compiles a kernel when it is first called, so the first steps of a worker with an empty cache
take minutes on busy cores. A worker that compiles makes progress, and is told apart from one that
is stuck in a step by this clock.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from numba.core import event

LONGEST_S = 600.0
"""Seconds of a single compilation that count as such; one that takes longer is stuck itself."""


class CompileClock(event.Listener):
    """Adds up the time in which any thread holds numba's compiler lock, or waits for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth, self._since, self._total_s = 0, 0.0, 0.0

    def on_start(self, event: object = None) -> None:
        with self._lock:
            self._since = self._since if self._depth else time.monotonic()
            self._depth += 1

    def on_end(self, event: object = None) -> None:
        with self._lock:
            self._depth -= 1
            if not self._depth:
                self._total_s += self._present_s()

    def _present_s(self) -> float:
        return min(time.monotonic() - self._since, LONGEST_S)

    @property
    def seconds(self) -> float:
        """Seconds until now, those of a compilation under way included."""
        with self._lock:
            return self._total_s + (self._present_s() if self._depth else 0.0)


_CLOCK = CompileClock()
event.register("numba:compiler_lock", _CLOCK)


def compile_seconds() -> float:
    """Seconds that this process has spent in compiling kernels until now; any thread."""
    return _CLOCK.seconds


@contextmanager
def counted_as_compilation() -> Iterator[None]:
    """Count the time within: that of waiting for another process that compiles, too."""
    _CLOCK.on_start()
    try:
        yield
    finally:
        _CLOCK.on_end()
