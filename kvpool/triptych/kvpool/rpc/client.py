"""A worker's access to the pool: allocate and free pages, hand requests off, attach them."""

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from triptych.core.errors import NotRegistered, PoolError, PoolUnavailable, StaleHandle
from triptych.core.handles import LeaseId, LeaseRef, arena_ids, can_access
from triptych.core.messages import CacheMemoryBorrowed
from triptych.kvpool.disk.tier import Coming, Disk, DiskSettings
from triptych.kvpool.pool.arena import Arena
from triptych.kvpool.pool.descriptors import descriptors_path, receive
from triptych.kvpool.pool.device_arenas import HOST, ArenaShape, DeviceArenas, Driver
from triptych.kvpool.pool.free_list import PageIds
from triptych.kvpool.pool.leases import NOTHING_TOLD, About, Commit
from triptych.kvpool.pool.page_pool import Pool
from triptych.kvpool.pool.processes import this_process
from triptych.kvpool.pool.stats import PageMap, PoolStats
from triptych.kvpool.prefix.blocks import Namespace, PinId, Publication, TokenIds, encode
from triptych.kvpool.prefix.cache import FoundPrefix, PrefixSettings
from triptych.kvpool.rpc import calls, prefix_calls
from triptych.kvpool.rpc.auth import Access
from triptych.kvpool.rpc.channel import FrameChannel
from triptych.kvpool.rpc.local_pool import LockedPool, PoolCall
from triptych.kvpool.rpc.messages import Registered
from triptych.kvpool.rpc.page_cache import PageCache
from triptych.kvpool.rpc.page_ranges import PageRanges
from triptych.kvpool.rpc.stub import PoolProxy, PoolStub

logger = logging.getLogger(__name__)

R = TypeVar("R")

HEARTBEAT_PERIOD_S = 1.0
CONNECT_TIMEOUT_S = 30.0


class WorkerPool:
    """One worker's registration with a pool; ``PoolClient`` and ``LocalPool`` make one.

    ``allocate`` and ``free`` work on a local page cache and call the pool only when the cache
    has too few or too many pages. Any thread may call; calls wait for each other.

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

    # -------------------------------------------------------------- memory

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

    # -------------------------------------------------------------- pages

    def allocate(self, count: int, arena: str = "") -> PageIds:
        """Allocate pages to write into, at home unless another arena of the pool is named.

        Shapes:  -> (count,) ids
        Raises:  PoolExhausted, and nothing is lost; PoolUnavailable; NotRegistered
        """
        with self._lock:
            self._require_registered()
            if arena and arena != self.home:
                if not self.has(arena):
                    raise PoolError(f"arena {arena} is not accessed from {self.home}")
                asked = calls.AllocatePages(
                    worker=self._id, pages=count, at_least=count, arena=arena
                )
                ids = self._ask(asked).pages.ids(self._registered.pages)
                return self._page_cache.allocate_granted(ids)
            short = count - len(self._page_cache)
            if short > 0:
                pages = max(short, self._registered.extent_pages)
                asked = calls.AllocatePages(worker=self._id, pages=pages, at_least=short)
                allocated = self._ask(asked).pages.ids(self._registered.pages)
                # A pool in one process allocates exactly as many as are needed: the usual case.
                if allocated.size == count and not len(self._page_cache):
                    return self._page_cache.allocate_granted(allocated)
                self._page_cache.add(allocated)
            return self._page_cache.allocate(count)

    def free(self, ids: PageIds) -> None:
        """Free pages that were allocated here, or kept from a released lease.

        Raises: NotHeld if one was not, or comes twice; nothing changes
        """
        with self._lock:
            self._require_registered()
            if len(self._registered.sizes) > 1:
                ids = self._free_elsewhere(ids)
            self._page_cache.free(ids)
            extent = self._registered.extent_pages
            if len(self._page_cache) > 2 * extent:
                self._free_idle(len(self._page_cache) - extent)

    def _free_elsewhere(self, ids: PageIds) -> PageIds:
        """Free those of some pages that are not at home, and return the others."""
        at_home = (ids >= self._home.start) & (ids < self._home.stop)
        others = ids[~at_home]
        if others.size:
            self._page_cache.give_back(others)
            self._ask(calls.FreePages(worker=self._id, pages=PageRanges(others)))
        return ids[at_home]

    # -------------------------------------------------------------- requests

    def handoff(
        self,
        commits: Sequence[Commit],
        releases: Sequence[LeaseId] = (),
        *,
        keep: bool = False,
        about: Sequence[About] = (),
        pins: Sequence[PinId | None] = (),
    ) -> list[LeaseRef]:
        """Put pages under new leases for the next stage, and end other leases, in one step.

        ``commits`` are (request, ids): pages allocated here, or of leases attached here, in any
        mix. The pages left in the released leases become free in the same step; with ``keep``
        they count as allocated here. Until another worker attaches a lease, ``release`` ends it.
        ``about`` gives the tenant and the page formats of each commit, or of none; the pool uses
        it for statistics only.

        The last pages of a commit may belong to a cached prefix: to one of ``pins``, which are
        pins of this worker, one per commit or none at all, or to a released lease of the same
        request. The pin moves on with the request, and must not be released here any more.

        Raises: NotHeld, StaleHandle, PoolError: nothing changed; PoolUnavailable; NotRegistered
        """
        told = about or [NOTHING_TOLD] * len(commits)
        pinned = pins or [None] * len(commits)
        with self._lock:
            self._require_registered()
            for _, ids in commits:
                self._page_cache.require_in_use(ids)
            asked = calls.HandOff(
                worker=self._id,
                commits=tuple(
                    calls.CommitPages(label, PageRanges(ids), each, pin)
                    for (label, ids), each, pin in zip(commits, told, pinned, strict=True)
                ),
                releases=tuple(releases),
                keep=keep,
            )
            lease_refs = self._ask(asked).exactly(len(commits))
            for lease_ref, (_, ids) in zip(lease_refs, commits, strict=True):
                self._page_cache.committed(lease_ref.lease, _own(lease_ref, ids))
            self._page_cache.released(releases, keep=keep)
            return lease_refs

    def attach(self, wanted: Sequence[tuple[LeaseRef, PageIds]]) -> list[LeaseRef]:
        """Take over leases that another worker handed off; returns the new references to them.

        ``wanted`` are references with all page ids of their handles, in any order, except that
        shared pages come last.

        Raises: StaleHandle, NotHeld: nothing changed; PoolUnavailable; NotRegistered
        """
        with self._lock:
            self._require_registered()
            for lease_ref, _ in wanted:
                if not self.has(lease_ref.arena):
                    raise StaleHandle(
                        lease_ref.lease, f"arena {lease_ref.arena} is not accessed from {self.home}"
                    )
            asked = calls.AttachLeases(
                worker=self._id,
                wanted=tuple(calls.LeasePages(each, PageRanges(ids)) for each, ids in wanted),
            )
            lease_refs = self._ask(asked).exactly(len(wanted))
            for lease_ref, (_, ids) in zip(lease_refs, wanted, strict=True):
                self._page_cache.attached(lease_ref.lease, _own(lease_ref, ids))
            return lease_refs

    def release(self, leases: Sequence[LeaseId], *, keep: bool = False) -> None:
        """End leases of this worker; their pages become free, or with ``keep`` allocated here.

        Raises: StaleHandle: nothing changed; PoolUnavailable; NotRegistered
        """
        with self._lock:
            self._call(calls.ReleaseLeases(worker=self._id, leases=tuple(leases), keep=keep))
            self._page_cache.released(leases, keep=keep)

    def withdraw(self, requests: Sequence[str]) -> None:
        """End all leases that this worker has for these requests, and free their pages.

        A lease that another worker has attached is not touched.

        Raises: PoolUnavailable; NotRegistered
        """
        asked = calls.WithdrawRequests(worker=self._id, labels=tuple(requests))
        with self._lock:
            self._page_cache.released(self._call(asked).leases, keep=False)

    def withdraw_all(self) -> None:
        """End all request leases of this worker, also those that nobody has attached yet.

        Raises: PoolUnavailable; NotRegistered
        """
        with self._lock:
            ended = self._call(calls.WithdrawAll(worker=self._id)).leases
            self._page_cache.released(ended, keep=False)

    # -------------------------------------------------------------- takeover

    def inherit(self, previous_worker: str) -> NDArray[np.uint8]:
        """Map the checkpoint of a dead worker. If the worker still runs, the pool ends it first.

        Raises: StaleHandle if there is none; PoolUnavailable
        """
        left = self._proxy.call(calls.InheritFrom(previous_worker=previous_worker))
        return self._open_checkpoint(left.checkpoint, left.checkpoint_bytes).data[0]

    def adopt(
        self, previous_worker: str, request: str, lease: LeaseId | None, ids: PageIds
    ) -> LeaseRef:
        """Take over one request of a dead worker with exactly these pages, shared ones last.

        None for ``lease``: the last lease that the pool has for the request.

        Raises: StaleHandle, NotHeld: nothing changed; PoolUnavailable; NotRegistered
        """
        asked = calls.AdoptRequest(
            worker=self._id,
            previous_worker=previous_worker,
            label=request,
            lease=lease,
            pages=PageRanges(ids),
        )
        with self._lock:
            (lease_ref,) = self._call(asked).exactly(1)
            self._page_cache.attached(lease_ref.lease, _own(lease_ref, ids))
            return lease_ref

    # -------------------------------------------------------------- prefixes of prompts

    def find_prefix(self, namespace: Namespace, tokens: TokenIds) -> FoundPrefix | None:
        """Pin the longest cached prefix of a prompt, never all of it; None if nothing is cached.

        Its pages are read only, and stay resident until ``release_prefix``.

        Raises: PoolUnavailable; NotRegistered
        """
        asked = prefix_calls.FindPrefix(worker=self._id, namespace=namespace, tokens=encode(tokens))
        return self._call(asked).found(self.capacity_pages)

    def pin_prefix(self, namespace: Namespace, tokens: TokenIds) -> FoundPrefix | None:
        """Pin all whole blocks of these tokens; None if not all are cached.

        Its pages are read only, and stay resident until ``release_prefix``, or until the
        request ends that the pin was handed off with.

        Raises: PoolUnavailable; NotRegistered
        """
        asked = prefix_calls.PinPrefix(worker=self._id, namespace=namespace, tokens=encode(tokens))
        return self._call(asked).found(self.capacity_pages)

    @property
    def restores(self) -> bool:
        """Whether the prefix cache has a disk tier to load from."""
        return self._registered.restores

    def restore_prefix(self, namespace: Namespace, tokens: TokenIds, tenant: str) -> Coming:
        """Begin to load from disk the blocks that continue the cached prefix of a prompt.

        Call again until no block is on its way, or the caller prefers to compute. Loaded
        blocks count against the quota of ``tenant``.

        Raises: PoolUnavailable; NotRegistered
        """
        asked = prefix_calls.RestorePrefix(
            worker=self._id, namespace=namespace, tokens=encode(tokens), tenant=tenant
        )
        coming = self._call(asked)
        return Coming(coming.blocks, coming.seconds)

    def release_prefix(self, pin: PinId) -> None:
        """Release a pin.

        Raises: PoolError if it is not one of this worker; PoolUnavailable; NotRegistered
        """
        self._call(prefix_calls.ReleasePrefix(worker=self._id, pin=pin))

    def known_prefix(self, namespace: Namespace, tokens: TokenIds) -> int:
        """The number of blocks of these tokens that are cached, in a chain from the first.

        Raises: PoolUnavailable; NotRegistered
        """
        asked = prefix_calls.KnowPrefix(worker=self._id, namespace=namespace, tokens=encode(tokens))
        return self._call(asked).blocks

    def known_windows(self, namespace: Namespace, tokens: TokenIds) -> tuple[bool, ...]:
        """Of each cached block of these tokens, whether its window entry is cached too.

        Raises: PoolUnavailable; NotRegistered
        """
        asked = prefix_calls.KnowWindows(
            worker=self._id, namespace=namespace, tokens=encode(tokens)
        )
        return self._call(asked).are_cached

    def publish_prefix(self, new: Publication) -> int:
        """Add blocks, or window entries, to the prefix cache; returns how many were added.

        Their pages are allocated here and written. The pages of the last blocks, as many as
        were added, belong to the pool from then on, and must not be written any more; the
        caller frees the others.

        Raises: NotHeld, PoolError: nothing changed; PoolUnavailable; NotRegistered
        """
        with self._lock:
            self._require_registered()
            for pages in new.blocks:
                self._page_cache.require_in_use(pages)
            asked = prefix_calls.PublishPrefix(
                worker=self._id,
                namespace=new.namespace,
                tokens=encode(new.tokens),
                blocks=tuple(map(PageRanges, new.blocks)),
                seconds=new.seconds,
                tenant=new.tenant,
                formats=tuple(new.formats),
                are_windows=new.are_windows,
            )
            added = self._ask(asked).blocks
            for pages in new.blocks[len(new.blocks) - added :]:
                self._page_cache.left(pages)
            return added

    def keep_session(
        self, namespace: Namespace, tokens: TokenIds, tenant: str, session: str
    ) -> int:
        """Evict the cached blocks of a conversation last, for its TTL; returns how many.

        Raises: PoolUnavailable; NotRegistered
        """
        asked = prefix_calls.KeepSession(
            worker=self._id,
            namespace=namespace,
            tokens=encode(tokens),
            tenant=tenant,
            session=session,
        )
        return self._call(asked).blocks

    # -------------------------------------------------------------- the pool as a whole

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

    # -------------------------------------------------------------- registration

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
    index = _index_of_home(pool)
    first = sum(pool.sizes[:index])
    return range(first, first + pool.sizes[index])


def _index_of_home(pool: Registered) -> int:
    return arena_ids(pool.arena, len(pool.sizes), are_apart=pool.are_apart).index(pool.home)


def _own(lease_ref: LeaseRef, ids: PageIds) -> PageIds:
    """The pages of a lease that are not shared."""
    return ids[: ids.size - lease_ref.shared]


class PoolClient(WorkerPool):
    """A worker's access to the pool process of its device, with a heartbeat of its own."""

    def __init__(
        self,
        address: str,
        worker: str,
        *,
        directory: Path | None = None,
        arena_directory: Path | None = None,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        checkpoint_bytes: int = 0,
        device: tuple[Driver, str] | None = None,
        keeps_copies: bool = False,
    ) -> None:
        """Connect, wait until the pool is there, and map its arenas.

        ``worker`` names one start of one process: the next registration under it replaces this
        one. ``directory`` is the pool's directory of shared memory, and ``arena_directory`` that
        of its arena, if it is another one. With ``checkpoint_bytes`` there is a checkpoint, and
        the leases of this worker wait for a takeover worker when it dies. ``device``: where this
        worker computes, and the driver that maps pages there; None: on the host. ``keeps_copies``:
        where devices cannot access each other, this worker's pages are in host memory, with copies
        on its device.

        Raises: PoolUnavailable if the pool does not answer in time; PoolError if its pages are on
            devices, and this worker computes on none
        """
        self._remote = PoolStub(FrameChannel(address), connect_timeout_s)
        self._leaving = threading.Event()

        def map_arena(pool: Registered) -> Arena:
            if pool.devices:
                return _map_devices(pool, address, device)
            shape = (pool.pages, pool.page_bytes)
            return Arena.open(pool.arena, shape, arena_directory or directory)

        def open_checkpoint(name: str, size: int) -> Arena:
            return Arena.open(name, (1, size), directory)

        try:
            super().__init__(
                self._remote,
                worker,
                map_arena,
                open_checkpoint,
                checkpoint_bytes,
                device[1] if device else HOST,
                keeps_copies=keeps_copies,
            )
        except BaseException:
            self._remote.close()
            raise
        self._heart = threading.Thread(target=self._beat, name="pool-heartbeat", daemon=True)
        self._heart.start()

    def close(self) -> None:
        self._leaving.set()
        super().close()
        self._heart.join()
        self._remote.close()
        self.arena.close()

    def _beat(self) -> None:
        period_s = min(HEARTBEAT_PERIOD_S, self._registered.lease_ttl_s / 4)
        while self._lost is None and not self._leaving.wait(period_s):
            try:
                self._renew()
            except PoolError as error:
                if not self._leaving.is_set():
                    logger.warning("worker %s lost its pool: %s", self.worker, error)


def _map_devices(pool: Registered, address: str, device: tuple[Driver, str] | None) -> DeviceArenas:
    if device is None:
        raise PoolError("the pages of the pool are on devices, and this worker computes on none")
    shape = ArenaShape(pool.sizes, pool.page_bytes, pool.devices, pool.are_apart)
    driver, name = device
    home = (HOST, *pool.devices)[_index_of_home(pool)]
    descriptors = receive(descriptors_path(address), shape.accessed(name, home))
    try:
        return DeviceArenas(pool.arena, shape, driver, descriptors, name, home)
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)


class PoolWatcher:
    """Reads statistics of a pool from a process that is not a worker."""

    def __init__(self, address: str, timeout_s: float = 2.0, access: Access | None = None) -> None:
        """``access``: what to show to a pool of another node."""
        self._remote = PoolStub(FrameChannel(address, access), timeout_s)

    def stat(self) -> PoolStats | None:
        """Statistics; None if the pool does not answer."""
        try:
            return self._remote.call(calls.StatPool())
        except PoolUnavailable:
            return None

    def map(self, max_entries: int) -> PageMap | None:
        """The map of pages; None if the pool does not answer."""
        try:
            return self._remote.call(calls.MapPages(max_entries=max_entries))
        except PoolUnavailable:
            return None

    def expel(self, worker: str) -> None:
        """Have the pool reclaim all pages of a dead worker.

        Raises: PoolUnavailable
        """
        self._remote.call(calls.ExpelWorker(name=worker))

    def borrow_cache_memory(self, nbytes: int) -> CacheMemoryBorrowed:
        """Set how many bytes of the prefix cache requests may use, in all.

        Raises: PoolUnavailable
        """
        return self._remote.call(prefix_calls.SetBorrowedMemory(nbytes=nbytes))

    def close(self) -> None:
        self._remote.close()


class LocalPool(WorkerPool):
    """A pool, its memory and one worker in this process, for stages that share it.

    There is no process in between and no page cache: each ``allocate`` goes to the pool.
    """

    def __init__(
        self,
        pages: int,
        page_bytes: int,
        worker: str = "local",
        prefixes: PrefixSettings | None = None,
        disk: DiskSettings | None = None,
        arena_directory: Path | None = None,
    ) -> None:
        """Without ``arena_directory`` the pages are memory of this process.

        Raises: PoolError if a directory cannot be had
        """
        self._memory = (
            Arena.create(pages, page_bytes, arena_directory)
            if arena_directory
            else Arena.private(pages, page_bytes)
        )
        books = Pool(pages, page_bytes, self._memory.id, math.inf)
        self._disk = Disk.open(disk, self._memory.data) if disk and prefixes else None
        self._pool = LockedPool(books, extent_pages=0, prefixes=prefixes, disk=self._disk)
        super().__init__(self._pool, worker, self._arena_of, self._checkpoint_of)

    def join(self, worker: str, checkpoint_bytes: int = 0) -> WorkerPool:
        """Another worker of the same pool."""
        return WorkerPool(self._pool, worker, self._arena_of, self._checkpoint_of, checkpoint_bytes)

    def _arena_of(self, _: Registered) -> Arena:
        return self._memory

    def _checkpoint_of(self, name: str, _: int) -> Arena:
        return self._pool.checkpoint(name)

    def borrow_cache_memory(self, nbytes: int) -> CacheMemoryBorrowed:
        """Set how many bytes of the prefix cache requests may use, in all."""
        return self._pool.call(prefix_calls.SetBorrowedMemory(nbytes=nbytes))

    def check(self) -> list[str]:
        """Contradictions between the pool's tables; empty if there are none."""
        return self._pool.check()

    def close(self) -> None:
        super().close()
        if self._disk:
            self._disk.close()
        self._memory.unlink()
        self._memory.close()
