"""How fast the waiting line moves, for an honest ``Retry-After``."""

from collections import deque
from dataclasses import dataclass, field

WINDOW_S = 30.0
MIN_RETRY_S = 1.0
MAX_RETRY_S = 60.0
UNKNOWN_RETRY_S = 5.0
"""Answer while nothing has left the line yet."""


@dataclass
class DrainRate:
    """Remembers when requests left the line, for half a minute."""

    _left: deque[float] = field(default_factory=lambda: deque[float](maxlen=4096))
    _has_moved: bool = False

    def note(self, now: float) -> None:
        """One request left the line at ``now``."""
        self._left.append(now)
        self._has_moved = True

    def retry_after_s(self, waiting: int, now: float) -> float:
        """Seconds until ``waiting`` requests will have left, at the rate seen so far.

        Time since the last one counts too: a line that stands still says longer and longer.
        """
        if not self._has_moved:
            return UNKNOWN_RETRY_S
        while self._left and now - self._left[0] > WINDOW_S:
            self._left.popleft()
        if not self._left:
            return MAX_RETRY_S
        seconds_each = (now - self._left[0]) / len(self._left)
        return min(MAX_RETRY_S, max(MIN_RETRY_S, waiting * seconds_each))
