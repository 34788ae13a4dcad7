"""Measures the speed of the link from other nodes while pages are fetched."""

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

WEIGHT = 0.3
"""Weight of the newest measurement in the mean."""
SAMPLE_S = 1.0
"""Seconds of transfers after which the speed is measured, if they do not end before."""
LEAST_BYTES = 1 << 16
"""Fewer bytes tell about latency, not about speed."""


@dataclass(eq=False)
class LinkMeter:
    """Bytes per second of all transfers together, over the times when any runs; any thread."""

    clock: Callable[[], float] = time.monotonic
    bytes_s: float = 0.0
    """Moving mean; 0: nothing was fetched."""
    _running: int = 0
    _since: float = 0.0
    _bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def transfer(self) -> Generator[None]:
        """A transfer runs meanwhile."""
        with self._lock:
            if not self._running:
                self._since, self._bytes = self.clock(), 0
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                if not self._running:
                    self._measure()

    def arrived(self, count: int) -> None:
        """``count`` bytes of a transfer have arrived."""
        with self._lock:
            self._bytes += count
            if self.clock() - self._since >= SAMPLE_S:
                self._measure()

    def _measure(self) -> None:
        now = self.clock()
        if self._bytes >= LEAST_BYTES and now > self._since:
            speed = self._bytes / (now - self._since)
            self.bytes_s += (WEIGHT if self.bytes_s else 1.0) * (speed - self.bytes_s)
            self._since, self._bytes = now, 0
