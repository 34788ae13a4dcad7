"""Requests that wait for the beginning of their prompt to come back from disk."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from triptych.core.messages import Request
from triptych.workers.kv.prefix_cache import PrefixStore

ASK_EVERY_S = 0.002


@dataclass(slots=True)
class _Wait:
    request: Request
    until: float
    ask_at: float


@dataclass
class PrefixRestore:
    """Asks the pool, from time to time, whether anything is still on its way.

    Nobody waits longer than it would take to compute what is awaited, so a disk that hangs costs
    as much again at the most. Nothing here blocks: others are read meanwhile.
    """

    prefixes: PrefixStore
    clock: Callable[[], float] = time.monotonic
    _waits: dict[str, _Wait] = field(default_factory=dict[str, _Wait])

    def begin(self, request: Request) -> None:
        """Have what is on disk brought back, if anything is.

        Raises: PoolUnavailable, NotRegistered
        """
        seconds = self._ask(request)
        if seconds > 0:
            now = self.clock()
            self._waits[request.id] = _Wait(request, now + seconds, now + ASK_EVERY_S)

    def is_ready(self, request: str) -> bool:
        """Whether a request need not wait, as far as is known without asking."""
        wait = self._waits.get(request)
        return wait is None or self.clock() >= min(wait.ask_at, wait.until)

    def settle(self, request: str) -> bool:
        """Whether a request waits no longer; asks if it is time to.

        Raises: PoolUnavailable, NotRegistered
        """
        wait = self._waits.get(request)
        if wait is None:
            return True
        now = self.clock()
        if now < min(wait.ask_at, wait.until):
            return False
        if now < wait.until and self._ask(wait.request) > 0:
            wait.ask_at = self.clock() + ASK_EVERY_S
            return False
        del self._waits[request]
        return True

    @property
    def wait_s(self) -> float | None:
        """Seconds until somebody is to ask again; None if nobody waits."""
        due = min((wait.ask_at for wait in self._waits.values()), default=None)
        return None if due is None else max(0.0, due - self.clock())

    def forget(self, requests: Iterable[str]) -> None:
        for request in requests:
            self._waits.pop(request, None)

    def _ask(self, request: Request) -> float:
        return self.prefixes.restore(request)
