"""A pool with a clock and a lock, used by the server, and directly by stages in one process."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Generic, TypeVar

from triptych.core.errors import PoolError, StaleHandle
from triptych.core.handles import LeaseId
from triptych.kvpool.disk.tier import Disk, DiskTier
from triptych.kvpool.pool.arena import Arena
from triptych.kvpool.pool.free_list import PageIds
from triptych.kvpool.pool.leases import WorkerId
from triptych.kvpool.pool.page_pool import Pool
from triptych.kvpool.pool.processes import ELSEWHERE, ProcessKey, end
from triptych.kvpool.pool.reservation import RESERVING_WORKER
from triptych.kvpool.pool.stats import DiskStats, NetworkStats, PoolStats, PrefixStats
from triptych.kvpool.prefix.cache import PREFIX_WORKER, PrefixCache, PrefixSettings
from triptych.kvpool.rpc.messages import Inheritance, Registered

logger = logging.getLogger(__name__)

OWN_WORKERS = (PREFIX_WORKER, RESERVING_WORKER)
"""Workers of the pool's own; nobody else may use their names."""

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class PoolCall(Generic[R_co]):
    """One call of the pool: a message with the arguments, which runs on a pool.

    A subclass is a ``@message`` dataclass, and ``run`` is annotated with the class of its reply,
    itself a message. Over a socket the pool's process unpacks the message and runs it; in one
    process it runs at once.
    """

    __slots__ = ()

    reply: ClassVar[type[Any]]
    """Class of the reply, which a peer's reply is compared with."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.reply = cls.run.__annotations__["return"]

    def run(self, pool: "LockedPool") -> R_co:
        """Make the call on a pool of this process, which this method locks."""
        raise NotImplementedError


class LockedPool:
    """A ``Pool`` of this process with what belongs to it; any thread may call.

    Each call takes the ``lock`` for as long as it uses ``page_pool``, ``prefixes`` or ``disk``.

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
        """The number of pages: of ids from a peer, all must be below it."""
        self.page_pool = pool
        self.now = clock
        self.lock = threading.Lock()
        self.prefixes = PrefixCache(pool, prefixes) if prefixes else None
        self.disk = DiskTier(self.prefixes, disk, self.lock) if self.prefixes and disk else None
        self._extent_pages = extent_pages
        self._make_memory = make_memory
        self._checkpoints = dict[str, Arena]()
        """By the worker's name."""
        self._disk_fault = disk_fault
        self._network = Counter[str]()

    def call(self, asked: PoolCall[R]) -> R:
        """Run a call at once."""
        return asked.run(self)

    # -------------------------------------------------------------- with the lock held

    def heard(self, worker: WorkerId) -> Pool:
        """The page pool, after the worker's leases are extended. Needs the lock.

        Raises: NotRegistered
        """
        self.page_pool.hear(worker, self.now())
        return self.page_pool

    def require_prefixes(self) -> PrefixCache:
        """The prefix cache. Needs the lock. Raises: PoolError if there is none"""
        if self.prefixes is None:
            raise PoolError("this pool keeps no prefixes")
        return self.prefixes

    def forget_lost(self, and_of: str = "") -> None:
        """Drop checkpoints of workers without pages, and pins of workers that are gone.

        Needs the lock.
        """
        if self.prefixes:
            self.prefixes.forget_lost()
        for name in list(self._checkpoints):
            if name == and_of or not self.page_pool.knows(name):
                checkpoint = self._checkpoints.pop(name)
                checkpoint.unlink()
                checkpoint.close()

    # -------------------------------------------------------------- workers

    def register(self, name: str, process: ProcessKey, checkpoint_bytes: int) -> Registered:
        """Register a worker, with memory for its checkpoint if it wants some."""
        if name in OWN_WORKERS:
            raise PoolError(f"worker {name!r}: the name is the pool's own")
        checkpoint = self._make_memory(1, checkpoint_bytes) if checkpoint_bytes else None
        with self.lock:
            keeps = checkpoint is not None
            worker = self.page_pool.register(name, process, self.now(), keeps=keeps)
            self.forget_lost(and_of=name)
            if checkpoint is not None:
                self._checkpoints[name] = checkpoint
            return Registered(
                worker=worker,
                arena=self.page_pool.pool_id,
                pages=self.page_pool.pages,
                page_bytes=self.page_pool.page_bytes,
                lease_ttl_s=self.page_pool.lease_ttl_s,
                extent_pages=self._extent_pages,
                checkpoint=checkpoint.id if checkpoint is not None else "",
                restores=self.disk is not None,
            )

    def inherit(self, previous_worker: str) -> Inheritance:
        """End a worker's process and registration, and return its checkpoint."""
        if previous_worker in OWN_WORKERS:
            raise StaleHandle(0, f"worker {previous_worker!r} is the pool's own")
        self._fence(previous_worker)
        with self.lock:
            self.page_pool.mark_dead(previous_worker, self.now())
            self.forget_lost()
            checkpoint = self._checkpoints.get(previous_worker)
            if checkpoint is None:
                raise StaleHandle(0, f"worker {previous_worker!r} left nothing")
            return Inheritance(checkpoint=checkpoint.id, checkpoint_bytes=checkpoint.page_bytes)

    def expel(self, name: str) -> bool:
        """End a worker's process, and reclaim all its pages; whether the pool knew it."""
        if name in OWN_WORKERS:
            return False
        self._fence(name)
        with self.lock:
            was_there = self.page_pool.expel(name)
            self.forget_lost()
            return was_there

    def sweep(self, is_alive: Callable[[ProcessKey], bool]) -> list[str]:
        """Reclaim the pages of lost workers, and return the workers' names.

        A worker whose lease expires while others are being fenced is left to the next sweep: its
        own process still runs.
        """
        now = self.now()
        with self.lock:
            silent = self.page_pool.silent(now)
        for name in silent:
            self._fence(name)
        with self.lock:
            lost = self.page_pool.sweep(now, is_alive, silent)
            self.forget_lost()
            return lost

    def _fence(self, name: str) -> None:
        """End the worker's process, if there is one, before its pages get another owner."""
        with self.lock:
            process = self.page_pool.process_of(name)
        if process not in (None, ELSEWHERE) and not end(process):
            logger.warning("worker %s cannot be ended from here; it is trusted to be dead", name)

    def checkpoint(self, name: str) -> Arena:
        """The checkpoint of that name, for workers of this process."""
        with self.lock:
            return next(
                checkpoint for checkpoint in self._checkpoints.values() if checkpoint.id == name
            )

    def close(self) -> None:
        """Remove all checkpoints."""
        with self.lock:
            for checkpoint in self._checkpoints.values():
                checkpoint.unlink()
                checkpoint.close()
            self._checkpoints.clear()

    # -------------------------------------------------------------- other nodes

    def require_lease(self, worker: WorkerId, lease: LeaseId, ids: PageIds) -> None:
        """Raise unless these pages are in a lease that the worker has."""
        with self.lock:
            self.heard(worker).require_lease(worker, lease, ids)

    def count(self, what: str, amount: int = 1) -> None:
        """Count something of ``NetworkStats``."""
        with self.lock:
            self._network[what] += amount

    # -------------------------------------------------------------- reports

    def stat(self) -> PoolStats:
        """Statistics of the pool, its prefix cache, disk tier and network."""
        with self.lock:
            if self.prefixes:
                self.prefixes.end_sessions(self.now())
            ledger = self.page_pool.stat(self.now())
            disk = self.disk.line() if self.disk else DiskStats(fault=self._disk_fault)
            prefix = self.prefixes.line() if self.prefixes else PrefixStats()
            network = NetworkStats(**self._network)
            return replace(ledger, prefix=prefix, disk=disk, network=network)

    def check(self) -> list[str]:
        """Contradictions between the pool's tables; empty if there are none."""
        with self.lock:
            wrong = self.page_pool.check()
            return wrong + self.prefixes.check() if self.prefixes else wrong
