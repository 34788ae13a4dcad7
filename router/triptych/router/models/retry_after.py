"""Drain rate of the waiting queue, for ``Retry-After``."""

from collections import deque
from dataclasses import dataclass, field

WINDOW_S = 30.0
MIN_RETRY_S = 1.0
MAX_RETRY_S = 60.0
UNKNOWN_RETRY_S = 5.0
"""Value while no request has left the queue yet."""


@dataclass
class DrainRate:
    """Times at which requests left the queue, of the last 30 seconds."""

    _left: deque[float] = field(default_factory=lambda: deque[float](maxlen=4096))
    _has_moved: bool = False

    def note(self, now: float) -> None:
        """One request left the queue at ``now``."""
        self._left.append(now)
        self._has_moved = True

    def retry_after_s(self, waiting: int, now: float) -> float:
        """Seconds until ``waiting`` requests will have left, at the rate seen so far.

        The time since the last one counts too, so the value rises while the queue stands still.
        """
        if not self._has_moved:
            return UNKNOWN_RETRY_S
        while self._left and now - self._left[0] > WINDOW_S:
            self._left.popleft()
        if not self._left:
            return MAX_RETRY_S
        seconds_each = (now - self._left[0]) / len(self._left)
        return min(MAX_RETRY_S, max(MIN_RETRY_S, waiting * seconds_each))
