"""A pool with a clock and a lock, used by the server, and directly by stages in one process."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from triptych.core.errors import PoolError, StaleHandle
from triptych.core.handles import LeaseId, LeaseRef
from triptych.core.messages import CacheMemoryBorrowed
from triptych.kvpool.disk.tier import Coming, Disk, DiskTier
from triptych.kvpool.pool.arena import Arena
from triptych.kvpool.pool.free_list import PageIds
from triptych.kvpool.pool.leases import About, Commit, WorkerId
from triptych.kvpool.pool.page_pool import Pool
from triptych.kvpool.pool.processes import ELSEWHERE, ProcessKey, end
from triptych.kvpool.pool.stats import DiskStats, NetworkStats, PageMap, PoolStats, PrefixStats
from triptych.kvpool.prefix.blocks import Namespace, PinId, Publication, TokenIds
from triptych.kvpool.prefix.cache import PREFIX_WORKER, FoundPrefix, PrefixCache, PrefixSettings
from triptych.kvpool.rpc.messages import Inheritance, Registered

logger = logging.getLogger(__name__)


class LockedPool:
    """``PoolCalls`` over a ``Pool`` of this process, from any number of threads.

    It also owns the *checkpoints*: memory in which a decode worker records what its takeover worker
    needs. A checkpoint lives as long as the pages that it describes.
    """

    def __init__(
        self,
        pool: Pool,
        extent_pages: int,
        make_memory: Callable[[int, int], Arena] = Arena.private,
        clock: Callable[[], float] = time.monotonic,
        prefixes: PrefixSettings | None = None,
        disk: Disk | None = None,
        disk_fault: str = "",
    ) -> None:
        """``make_memory`` takes pages and bytes per page. Without ``prefixes`` there is no cache.

        ``disk_fault`` is the reason why there is no disk tier although the settings name one.
        """
        self.pages = pool.pages
        self._pool = pool
        self._extent_pages = extent_pages
        self._make_memory = make_memory
        self._clock = clock
        self._lock = threading.Lock()
        self._checkpoints = dict[str, Arena]()
        """By the worker's name."""
        self._prefixes = PrefixCache(pool, prefixes) if prefixes else None
        self._disk = DiskTier(self._prefixes, disk, self._lock) if self._prefixes and disk else None
        self._disk_fault = disk_fault
        self._network = Counter[str]()

    def register(self, name: str, process: ProcessKey, checkpoint_bytes: int) -> Registered:
        if name == PREFIX_WORKER:
            raise PoolError(f"worker {name!r}: the name is the pool's own")
        checkpoint = self._make_memory(1, checkpoint_bytes) if checkpoint_bytes else None
        with self._lock:
            worker = self._pool.register(name, process, self._clock(), keeps=checkpoint is not None)
            self._forget_lost(and_of=name)
            if checkpoint is not None:
                self._checkpoints[name] = checkpoint
            return Registered(
                worker=worker,
                arena=self._pool.arena_id,
                pages=self._pool.pages,
                page_bytes=self._pool.page_bytes,
                lease_ttl_s=self._pool.lease_ttl_s,
                extent_pages=self._extent_pages,
                checkpoint=checkpoint.id if checkpoint is not None else "",
                restores=self._disk is not None,
            )

    def inherit(self, previous_worker: str) -> Inheritance:
        """End a worker's process and registration, and return its checkpoint."""
        if previous_worker == PREFIX_WORKER:
            raise StaleHandle(0, f"worker {previous_worker!r} is the pool's own")
        self._fence(previous_worker)
        with self._lock:
            self._pool.mark_dead(previous_worker, self._clock())
            self._forget_lost()
            checkpoint = self._checkpoints.get(previous_worker)
            if checkpoint is None:
                raise StaleHandle(0, f"worker {previous_worker!r} left nothing")
            return Inheritance(checkpoint=checkpoint.id, checkpoint_bytes=checkpoint.page_bytes)

    def adopt(
        self,
        worker: WorkerId,
        previous_worker: str,
        label: str,
        lease: LeaseId | None,
        ids: PageIds,
    ) -> LeaseRef:
        with self._lock:
            return self._heard(worker).adopt(worker, previous_worker, label, lease, ids)

    def checkpoint(self, name: str) -> Arena:
        """The checkpoint of that name, for workers of this process."""
        with self._lock:
            return next(
                checkpoint for checkpoint in self._checkpoints.values() if checkpoint.id == name
            )

    def close(self) -> None:
        """Remove all checkpoints."""
        with self._lock:
            for checkpoint in self._checkpoints.values():
                checkpoint.unlink()
                checkpoint.close()
            self._checkpoints.clear()

    def renew(self, worker: WorkerId) -> int:
        with self._lock:
            return self._pool.renew(worker, self._clock())

    def unregister(self, worker: WorkerId) -> None:
        with self._lock:
            self._pool.unregister(worker)
            self._forget_lost()

    def expel(self, name: str) -> bool:
        if name == PREFIX_WORKER:
            return False
        self._fence(name)
        with self._lock:
            was_there = self._pool.expel(name)
            self._forget_lost()
            return was_there

    def allocate(self, worker: WorkerId, pages: int, at_least: int) -> PageIds:
        with self._lock:
            return self._heard(worker).allocate(worker, pages, at_least)

    def free(self, worker: WorkerId, ids: PageIds) -> None:
        with self._lock:
            self._heard(worker).free(worker, ids)

    def handoff(
        self,
        worker: WorkerId,
        commits: Sequence[Commit],
        releases: Sequence[LeaseId],
        *,
        keep: bool,
        about: Sequence[About] = (),
        pins: Sequence[PinId | None] = (),
    ) -> list[LeaseRef]:
        with self._lock:
            pool = self._heard(worker)
            if all(pin is None for pin in pins):
                return pool.handoff(worker, commits, releases, keep=keep, about=about)
            return self._require_prefixes().handoff(
                worker, commits, releases, keep=keep, about=about, pins=pins
            )

    def attach(
        self, worker: WorkerId, wanted: Sequence[tuple[LeaseRef, PageIds]]
    ) -> list[LeaseRef]:
        with self._lock:
            return self._heard(worker).attach(worker, wanted)

    def release(self, worker: WorkerId, leases: Sequence[LeaseId], *, keep: bool) -> None:
        with self._lock:
            self._heard(worker).release(worker, leases, keep=keep)

    def require_lease(self, worker: WorkerId, lease: LeaseId, ids: PageIds) -> None:
        """Raise unless these pages are in a lease that the worker has."""
        with self._lock:
            self._heard(worker).require_lease(worker, lease, ids)

    def count(self, what: str, amount: int = 1) -> None:
        """Count something of ``NetworkStats``."""
        with self._lock:
            self._network[what] += amount

    def withdraw(self, worker: WorkerId, labels: Sequence[str]) -> list[LeaseId]:
        with self._lock:
            return self._heard(worker).withdraw(worker, labels)

    def withdraw_all(self, worker: WorkerId) -> list[LeaseId]:
        with self._lock:
            return self._heard(worker).withdraw_all(worker)

    def find_prefix(
        self, worker: WorkerId, namespace: Namespace, tokens: TokenIds
    ) -> FoundPrefix | None:
        with self._lock:
            self._heard(worker)
            return self._prefixes and self._prefixes.find(worker, namespace, tokens)

    def pin_prefix(
        self, worker: WorkerId, namespace: Namespace, tokens: TokenIds
    ) -> FoundPrefix | None:
        with self._lock:
            self._heard(worker)
            return self._prefixes and self._prefixes.pin_all(worker, namespace, tokens)

    def known_prefix(self, worker: WorkerId, namespace: Namespace, tokens: TokenIds) -> int:
        with self._lock:
            self._heard(worker)
            return self._prefixes.known(worker, namespace, tokens) if self._prefixes else 0

    def publish_prefix(self, worker: WorkerId, new: Publication) -> int:
        with self._lock:
            self._heard(worker)
            if self._prefixes is None:
                return 0
            self._prefixes.end_sessions(self._clock())
            done = self._prefixes.publish(worker, new)
            if self._disk:
                self._disk.evicted(done.evicted)
                self._disk.published(done.new)
            return done.added

    def keep_session(
        self,
        worker: WorkerId,
        namespace: Namespace,
        tokens: TokenIds,
        tenant: str,
        session: str,
    ) -> int:
        with self._lock:
            self._heard(worker)
            if self._prefixes is None:
                return 0
            now = self._clock()
            self._prefixes.end_sessions(now)
            return self._prefixes.keep_session(worker, namespace, tokens, tenant, session, now)

    def restore_prefix(
        self, worker: WorkerId, namespace: Namespace, tokens: TokenIds, tenant: str
    ) -> Coming:
        with self._lock:
            self._heard(worker)
            if self._disk is None:
                return Coming(0, 0.0)
            return self._disk.restore(namespace, tokens, tenant)

    def borrow_cache_memory(self, nbytes: int) -> CacheMemoryBorrowed:
        """Set how many bytes of the prefix cache requests may use, in all; pinned blocks stay."""
        with self._lock:
            lent = 0
            if self._prefixes:
                lent, evicted = self._prefixes.borrow_cache_memory(nbytes)
                if self._disk:
                    self._disk.evicted(evicted)
            return CacheMemoryBorrowed(arena=self._pool.arena_id, bytes=lent)

    def release_prefix(self, worker: WorkerId, pin: PinId) -> None:
        with self._lock:
            self._heard(worker)
            self._require_prefixes().release(worker, pin)

    def _require_prefixes(self) -> PrefixCache:
        if self._prefixes is None:
            raise PoolError("this pool keeps no prefixes")
        return self._prefixes

    def stat(self) -> PoolStats:
        with self._lock:
            if self._prefixes:
                self._prefixes.end_sessions(self._clock())
            ledger = self._pool.stat(self._clock())
            disk = self._disk.line() if self._disk else DiskStats(fault=self._disk_fault)
            prefix = self._prefixes.line() if self._prefixes else PrefixStats()
            network = NetworkStats(**self._network)
            return replace(ledger, prefix=prefix, disk=disk, network=network)

    def map(self, max_cells: int) -> PageMap:
        with self._lock:
            return self._pool.map(max_cells)

    def check(self) -> list[str]:
        """Contradictions between the pool's tables; empty if there are none."""
        with self._lock:
            wrong = self._pool.check()
            return wrong + self._prefixes.check() if self._prefixes else wrong

    def sweep(self, is_alive: Callable[[ProcessKey], bool]) -> list[str]:
        """Reclaim the pages of lost workers, and return the workers' names."""
        with self._lock:
            silent = self._pool.silent(self._clock())
        for name in silent:
            self._fence(name)
        with self._lock:
            lost = self._pool.sweep(self._clock(), is_alive)
            self._forget_lost()
            return lost

    def _fence(self, name: str) -> None:
        """End the worker's process, if there is one, before its pages get another owner."""
        with self._lock:
            process = self._pool.process_of(name)
        if process not in (None, ELSEWHERE) and not end(process):
            logger.warning("worker %s cannot be ended from here; it is trusted to be dead", name)

    def _forget_lost(self, and_of: str = "") -> None:
        """Drop checkpoints of workers without pages, and pins of workers that are gone."""
        if self._prefixes:
            self._prefixes.forget_lost()
        for name in list(self._checkpoints):
            if name == and_of or not self._pool.knows(name):
                checkpoint = self._checkpoints.pop(name)
                checkpoint.unlink()
                checkpoint.close()

    def _heard(self, worker: WorkerId) -> Pool:
        self._pool.hear(worker, self._clock())
        return self._pool
