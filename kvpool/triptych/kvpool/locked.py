"""A pool with a clock and a lock: what one process asks directly, and the service answers with."""

import threading
import time
from collections.abc import Callable, Sequence

from triptych.core.handles import Claim, LeaseId
from triptych.kvpool.freelist import PageIds
from triptych.kvpool.ledger import Ledger
from triptych.kvpool.pool import Commit, Pool, WorkerId
from triptych.kvpool.processes import ProcessKey
from triptych.kvpool.protocol import Registered


class LockedPool:
    """``PoolCalls`` over a ``Pool`` of this process, from any number of threads."""

    def __init__(
        self, pool: Pool, extent_pages: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.pages = pool.pages
        self._pool = pool
        self._extent_pages = extent_pages
        self._clock = clock
        self._lock = threading.Lock()

    def register(self, name: str, process: ProcessKey) -> Registered:
        with self._lock:
            return Registered(
                worker=self._pool.register(name, process, self._clock()),
                arena=self._pool.arena_id,
                pages=self._pool.pages,
                page_bytes=self._pool.page_bytes,
                lease_ttl_s=self._pool.lease_ttl_s,
                extent_pages=self._extent_pages,
            )

    def renew(self, worker: WorkerId) -> int:
        with self._lock:
            return self._pool.renew(worker, self._clock())

    def unregister(self, worker: WorkerId) -> None:
        with self._lock:
            self._pool.unregister(worker)

    def expel(self, name: str) -> bool:
        with self._lock:
            return self._pool.expel(name)

    def grant(self, worker: WorkerId, pages: int, at_least: int) -> PageIds:
        with self._lock:
            return self._heard(worker).grant(worker, pages, at_least)

    def give_back(self, worker: WorkerId, ids: PageIds) -> None:
        with self._lock:
            self._heard(worker).give_back(worker, ids)

    def handoff(
        self,
        worker: WorkerId,
        commits: Sequence[Commit],
        releases: Sequence[LeaseId],
        *,
        keep: bool,
    ) -> list[Claim]:
        with self._lock:
            return self._heard(worker).handoff(worker, commits, releases, keep=keep)

    def attach(self, worker: WorkerId, wanted: Sequence[tuple[Claim, PageIds]]) -> list[Claim]:
        with self._lock:
            return self._heard(worker).attach(worker, wanted)

    def release(self, worker: WorkerId, leases: Sequence[LeaseId], *, keep: bool) -> None:
        with self._lock:
            self._heard(worker).release(worker, leases, keep=keep)

    def withdraw(self, worker: WorkerId, labels: Sequence[str]) -> list[LeaseId]:
        with self._lock:
            return self._heard(worker).withdraw(worker, labels)

    def stat(self) -> Ledger:
        with self._lock:
            return self._pool.stat(self._clock())

    def check(self) -> list[str]:
        """Contradictions in the pool's books; empty if there are none."""
        with self._lock:
            return self._pool.check()

    def sweep(self, is_alive: Callable[[ProcessKey], bool]) -> list[str]:
        """Take back what lost workers held, and return the workers' names."""
        with self._lock:
            return self._pool.sweep(self._clock(), is_alive)

    def _heard(self, worker: WorkerId) -> Pool:
        self._pool.renew(worker, self._clock())
        return self._pool
