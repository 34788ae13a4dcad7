"""A pool with a clock and a lock, used by the server, and directly by stages in one process."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Generic, TypeVar

from triptych.core.errors import PoolError, StaleHandle, WritesPending
from triptych.core.handles import LeaseId
from triptych.kvpool.disk.tier import Disk, DiskTier
from triptych.kvpool.pool.arena import Arena
from triptych.kvpool.pool.free_list import PageIds
from triptych.kvpool.pool.leases import WorkerId
from triptych.kvpool.pool.page_pool import Pool
from triptych.kvpool.pool.processes import ELSEWHERE, ProcessKey, end, is_alive, is_here
from triptych.kvpool.pool.reservation import RESERVING_WORKER
from triptych.kvpool.pool.stats import DiskStats, NetworkStats, PoolStats, PrefixStats
from triptych.kvpool.prefix.cache import PREFIX_WORKER, PrefixCache, PrefixSettings
from triptych.kvpool.rpc.messages import Inheritance, Registered

logger = logging.getLogger(__name__)

OWN_WORKERS = (PREFIX_WORKER, RESERVING_WORKER)
"""Workers of the pool's own; nobody else may use their names."""

PROCESS_ENDED = "process %d of worker %s is ended: %s"
"""Logged for each process that runs when its pages get another owner."""

REVOCATION_S = 5.0
"""Longest time that a call waits for a device to be done with a dead worker."""

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


def has_no_queue(_: ProcessKey) -> bool:
    """Host memory: a dead process writes nothing."""
    return True


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
        devices: tuple[str, ...] = (),
        revoke: Callable[[ProcessKey], bool] = has_no_queue,
    ) -> None:
        """``make_memory`` takes pages and bytes per page. Without ``prefixes`` there is no cache.

        ``devices`` are those of the arenas behind the first one. ``revoke`` says whether no write
        that a dead process has queued on them can happen any more. ``disk_fault`` is the reason
        why there is no disk tier although the settings name one.
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
        self._devices, self._revoke = devices, revoke
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

    def register(
        self,
        name: str,
        process: ProcessKey,
        checkpoint_bytes: int,
        device: str = "",
        *,
        keeps_copies: bool = False,
    ) -> Registered:
        """Register a worker, with memory for its checkpoint if it wants some.

        ``keeps_copies``: of pages in host memory, on its device. If devices are apart its home is
        in host memory, where others can write the pages that it reads.

        Raises: PoolError if arenas are on other devices than ``device``; WritesPending if an
            earlier process of this name has some
        """
        if name in OWN_WORKERS:
            raise PoolError(f"worker {name!r}: the name is the pool's own")
        home = ""
        if device and self._devices:
            if device not in self._devices:
                raise PoolError(f"the pool has no arena on {device!r}: it has {self._devices}")
            if not (keeps_copies and self.page_pool.are_apart):
                home = self.page_pool.arenas[1 + self._devices.index(device)]
        with self.lock:
            before = self.page_pool.process_of(name)
        if before not in (None, process):
            self._await_revocation(name, before)
        checkpoint = self._make_memory(1, checkpoint_bytes) if checkpoint_bytes else None
        with self.lock:
            keeps = checkpoint is not None
            worker = self.page_pool.register(name, process, self.now(), keeps=keeps, home=home)
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
                home=home or self.page_pool.pool_id,
                sizes=self.page_pool.sizes,
                devices=self._devices,
                are_apart=self.page_pool.are_apart,
            )

    def inherit(self, previous_worker: str) -> Inheritance:
        """End a worker's process and registration, and return its checkpoint."""
        if previous_worker in OWN_WORKERS:
            raise StaleHandle(0, f"worker {previous_worker!r} is the pool's own")
        self._fence(previous_worker, "another worker continues its requests")
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
        self._fence(name, "the router counts it as lost")
        with self.lock:
            was_there = self.page_pool.expel(name)
            self.forget_lost()
            return was_there

    def sweep(self, is_alive: Callable[[ProcessKey], bool]) -> list[str]:
        """Reclaim the pages of lost workers, and return the workers' names.

        A worker whose lease expires while others are being fenced is left to the next sweep: its
        own process still runs. So is a dead one that a device still has work of. A silent one of
        this machine that holds nothing is lost only when its process ends: it may be loading its
        model on cores that others use. Calls go on meanwhile: the lock is not held while a driver
        is asked.
        """
        now = self.now()
        with self.lock:
            silent = [name for name in self.page_pool.silent(now) if not self._has_nothing(name)]
        why = f"no heartbeat for lease_ttl_s, {self.page_pool.lease_ttl_s:g} s"
        ended = {name: self._end(name, why) for name in silent}
        fenced = [name for name, one in ended.items() if one is None or self._revoke(one)]
        with self.lock:
            processes = self.page_pool.processes
        gone = {one for one in processes if not is_alive(one) and self._revoke(one)}
        with self.lock:
            lost = self.page_pool.sweep(now, lambda process: process not in gone, fenced)
            self.forget_lost()
            return lost

    def _has_nothing(self, name: str) -> bool:
        """Whether a process of this machine has neither pages nor pins. Needs the lock."""
        process, worker = self.page_pool.process_of(name), self.page_pool.without_pages(name)
        if process is None or worker is None or not is_here(process):
            return False
        return self.prefixes is None or not self.prefixes.has_pins(worker)

    def _fence(self, name: str, why: str) -> None:
        """End the worker's process, if there is one, before its pages get another owner.

        Raises: WritesPending
        """
        process = self._end(name, why)
        if process is not None:
            self._await_revocation(name, process)

    def _end(self, name: str, why: str) -> ProcessKey | None:
        """End the worker's process, and return it; None if there is none on this machine.

        A process that still runs cannot say why it ends, so the pool logs it.
        """
        with self.lock:
            process = self.page_pool.process_of(name)
        if process in (None, ELSEWHERE):
            return None
        if is_alive(process):
            logger.warning(PROCESS_ENDED, process.pid, name, why)
        if not end(process):
            logger.warning("worker %s cannot be ended from here; it is trusted to be dead", name)
        return process

    def _await_revocation(self, name: str, process: ProcessKey) -> None:
        """Wait until a device writes nothing more of what a worker has queued.

        Raises: WritesPending if that takes too long; a sweep reclaims the worker's pages later
        """
        until = time.monotonic() + REVOCATION_S
        while not self._revoke(process):
            if time.monotonic() > until:
                raise WritesPending(name)
            time.sleep(0.01)

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
