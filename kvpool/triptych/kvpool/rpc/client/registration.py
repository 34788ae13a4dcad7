"""A worker's registration with a pool: its memory, its heartbeat, and how it is lost."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from triptych.core.errors import NotRegistered, PoolError, PoolUnavailable
from triptych.core.handles import arena_ids, can_access
from triptych.kvpool.pool.arena import Arena
from triptych.kvpool.pool.device_arenas import HOST
from triptych.kvpool.pool.processes import this_process
from triptych.kvpool.pool.stats import PoolStats
from triptych.kvpool.rpc import calls
from triptych.kvpool.rpc.local_pool import PoolCall
from triptych.kvpool.rpc.messages import Registered
from triptych.kvpool.rpc.page_cache import PageCache
from triptych.kvpool.rpc.page_ranges import PageRanges
from triptych.kvpool.rpc.stub import PoolProxy

logger = logging.getLogger(__name__)

R = TypeVar("R")


class Registration:
    """One worker's registration with a pool, and the memory that it maps.

    Any thread may call; calls wait for each other.

    After an error that leaves open whether the pool executed a call (``PoolUnavailable``), or
    when the pool no longer knows this worker (``NotRegistered``), both sides may disagree
    about ownership. From then on every call raises the same error: close this and connect
    anew. The pool reclaims the pages.
    """

    def __init__(
        self,
        proxy: PoolProxy,
        worker: str,
        open_arena: Callable[[Registered], Arena],
        open_checkpoint: Callable[[str, int], Arena],
        checkpoint_bytes: int = 0,
        device: str = HOST,
        *,
        keeps_copies: bool = False,
    ) -> None:
        self.worker = worker
        self._proxy = proxy
        self._lock = threading.RLock()
        self._lost: PoolError | None = None
        self._fetched_bytes = 0
        self._renewed_s = time.monotonic()
        self._registered = proxy.call(
            calls.RegisterWorker(
                name=worker,
                process=this_process(),
                checkpoint_bytes=checkpoint_bytes,
                device=device,
                keeps_copies=keeps_copies,
            )
        )
        self._id = self._registered.worker
        self._open_checkpoint = open_checkpoint
        self._checkpoint = (
            open_checkpoint(self._registered.checkpoint, checkpoint_bytes)
            if checkpoint_bytes
            else None
        )
        self.arena = open_arena(self._registered)
        """The memory of all pages of the pool, mapped into this process. Its id is that of the
        pool, and of the arena in host memory."""
        self._page_cache = PageCache(worker, self._registered.pages)
        self._home = _pages_at_home(self._registered)

    @property
    def checkpoint(self) -> NDArray[np.uint8] | None:
        """Memory that outlives this process, for its takeover worker; zeros at first."""
        return None if self._checkpoint is None else self._checkpoint.data[0]

    @property
    def page_bytes(self) -> int:
        return self._registered.page_bytes

    @property
    def capacity_pages(self) -> int:
        return self._registered.pages

    @property
    def home(self) -> str:
        """The arena where this worker allocates: of its device, or in host memory."""
        return self._registered.home

    def has(self, arena: str) -> bool:
        """Whether this worker can read and write the pages of an arena."""
        return can_access(self.home, arena)

    @property
    def lease_ttl_s(self) -> float:
        """Seconds without a call after which the pool reclaims the pages of this worker."""
        return self._registered.lease_ttl_s

    @property
    def idle_pages(self) -> int:
        """Pages that ``allocate`` returns without a call to the pool."""
        return len(self._page_cache)

    @property
    def extent_pages(self) -> int:
        """Pages that one call to the pool allocates; 0: exactly as many as are needed."""
        return self._registered.extent_pages

    @property
    def allocated_pages(self) -> int:
        """Pages that are allocated here and neither freed nor handed off."""
        return self._page_cache.allocated

    @property
    def is_lost(self) -> bool:
        """Whether the registration is lost: every further call raises."""
        return self._lost is not None

    @property
    def bytes_copied(self) -> int:
        """Bytes of keys and values that were copied to bring them from stage to stage."""
        return self._fetched_bytes

    def note_fetched(self, count: int) -> None:
        """Count bytes that came into the arena from another node."""
        with self._lock:
            self._fetched_bytes += count

    def stat(self) -> PoolStats:
        """Statistics of the pool."""
        return self._proxy.call(calls.StatPool())

    def expel(self, worker: str) -> bool:
        """Have the pool reclaim all pages of a dead worker; whether the pool knew it."""
        return self._proxy.call(calls.ExpelWorker(name=worker)).was_there

    def close(self) -> None:
        """Unregister: all pages of this worker become free, and the memory is unmapped."""
        with self._lock:
            if self._lost is None:
                self._lost = PoolUnavailable(f"worker {self.worker!r} has left the pool")
                try:
                    self._proxy.call(calls.UnregisterWorker(worker=self._id))
                except PoolError as error:
                    logger.debug("worker %s left a pool that is gone: %s", self.worker, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _renew(self) -> None:
        """Renew the registration, and free idle pages if other workers lack pages."""
        asked_s = time.monotonic()
        lacking = self._ask(calls.RenewWorker(worker=self._id)).lacking_pages
        self._renewed_s = asked_s
        with self._lock:
            if lacking and self._lost is None:
                self._free_idle(min(lacking, len(self._page_cache)))

    def _free_idle(self, count: int) -> None:
        pages = PageRanges(self._page_cache.remove(count))
        self._ask(calls.FreePages(worker=self._id, pages=pages))

    def _require_registered(self) -> None:
        """Raise if the registration is lost, also if it expired while this process was frozen."""
        if self._lost:
            raise type(self._lost)(*self._lost.args)
        if time.monotonic() - self._renewed_s > self._registered.lease_ttl_s:
            self._renew()

    def _call(self, asked: PoolCall[R]) -> R:
        """Make a call to the pool; other calls of this worker wait for it."""
        with self._lock:
            self._require_registered()
            return self._ask(asked)

    def _ask(self, asked: PoolCall[R]) -> R:
        """Make a call, and mark the registration as lost if its outcome is not certain."""
        try:
            return self._proxy.call(asked)
        except (PoolUnavailable, NotRegistered) as error:
            self._lost = self._lost or error
            raise


def _pages_at_home(pool: Registered) -> range:
    """Ids of the pages at a worker's home."""
    index = index_of_home(pool)
    first = sum(pool.sizes[:index])
    return range(first, first + pool.sizes[index])


def index_of_home(pool: Registered) -> int:
    return arena_ids(pool.arena, len(pool.sizes), are_apart=pool.are_apart).index(pool.home)
