"""Requests that wait until their prefix is restored from disk."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from triptych.core.messages import Request
from triptych.workers.kv.prefix_cache import PrefixStore

POLL_EVERY_S = 0.002


@dataclass(slots=True)
class _Restore:
    request: Request
    until: float
    poll_at: float


@dataclass
class PrefixRestore:
    """Polls the pool for prefixes that are being restored from disk.

    A request waits at most as long as computing its prefix would take, so a disk that hangs at most
    doubles that time. No call blocks: other prompts are prefilled meanwhile.
    """

    prefixes: PrefixStore
    clock: Callable[[], float] = time.monotonic
    _restores: dict[str, _Restore] = field(default_factory=dict[str, _Restore])

    def start(self, request: Request) -> None:
        """Start the restore of a request's prefix if it is on disk.

        Raises: PoolUnavailable, NotRegistered
        """
        seconds = self._request_restore(request)
        if seconds > 0:
            now = self.clock()
            self._restores[request.id] = _Restore(request, now + seconds, now + POLL_EVERY_S)

    def is_ready(self, request: str) -> bool:
        """Whether a request need not wait, or should be polled now."""
        restore = self._restores.get(request)
        return restore is None or self.clock() >= min(restore.poll_at, restore.until)

    def poll(self, request: str) -> bool:
        """Whether a request waits no longer; polls the pool when due.

        Raises: PoolUnavailable, NotRegistered
        """
        restore = self._restores.get(request)
        if restore is None:
            return True
        now = self.clock()
        if now < min(restore.poll_at, restore.until):
            return False
        if now < restore.until and self._request_restore(restore.request) > 0:
            restore.poll_at = self.clock() + POLL_EVERY_S
            return False
        del self._restores[request]
        return True

    @property
    def wait_s(self) -> float | None:
        """Seconds until the next poll; None if no request waits."""
        due = min((restore.poll_at for restore in self._restores.values()), default=None)
        return None if due is None else max(0.0, due - self.clock())

    def pass_on(self, request: str, to: Request) -> None:
        """Another request with the same prompt waits instead of one."""
        restore = self._restores.pop(request, None)
        if restore is not None:
            restore.request = to
            self._restores[to.id] = restore

    def forget(self, requests: Iterable[str]) -> None:
        for request in requests:
            self._restores.pop(request, None)

    def _request_restore(self, request: Request) -> float:
        return self.prefixes.of_method(request.method).restore(request)
