"""Virtual clock: an event queue."""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Any

Action = Callable[..., None]


class Clock:
    """Runs actions at their times; those of the same time in the order of their addition."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue = list[tuple[float, int, Action, tuple[Any, ...]]]()
        self._order = count()

    def after(self, seconds: float, action: Action, *arguments: Any) -> None:
        """Schedule ``action`` for this many seconds from now."""
        heappush(self._queue, (self.now + seconds, next(self._order), action, arguments))

    def at(self, moment: float, action: Action, *arguments: Any) -> None:
        """Schedule ``action`` for a moment that is not past."""
        heappush(self._queue, (moment, next(self._order), action, arguments))

    def step(self) -> bool:
        """Advance to the next action and run it; False if there is none."""
        if not self._queue:
            return False
        self.now, _, action, arguments = heappop(self._queue)
        action(*arguments)
        return True
