"""Fetches the pages of a request from the pool of another node into this node's arena.

Two phases, so that no death in between loses a page: the fetcher keeps the lease at the source
pool until the pages have a lease at the target pool.

    allocate  pages of this worker, here
    attach    the lease, there: no other worker can attach it, and its producer may die
    copy      chunk after chunk, each with its checksum; after a break, from the last good page on
    handoff   here: from now on they are a request's pages like any other
    release   there

If this worker dies, both pools reclaim its pages when its leases expire.
"""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import TypeVar

from triptych.core.errors import (
    AccessRefused,
    Cancelled,
    MessageError,
    NotRegistered,
    PoolError,
    PoolUnavailable,
    StaleHandle,
)
from triptych.core.handles import LeaseId, LeaseRef
from triptych.kvpool.pool.free_list import PageIds
from triptych.kvpool.pool.leases import NOTHING_TOLD, About, WorkerId
from triptych.kvpool.pool.processes import ELSEWHERE
from triptych.kvpool.rpc import calls
from triptych.kvpool.rpc.auth import Access
from triptych.kvpool.rpc.channel import FrameChannel
from triptych.kvpool.rpc.client.pool_client import HEARTBEAT_PERIOD_S
from triptych.kvpool.rpc.client.worker_pool import WorkerPool
from triptych.kvpool.rpc.gateway import PoolAddress
from triptych.kvpool.rpc.messages import Registered
from triptych.kvpool.rpc.page_ranges import PageRanges
from triptych.kvpool.rpc.stub import PoolStub
from triptych.kvpool.transfer.link_meter import LinkMeter
from triptych.kvpool.transfer.page_stream import receive

logger = logging.getLogger(__name__)
R = TypeVar("R")

CONNECT_TIMEOUT_S = 5.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
"""Wait before a broken transfer goes on; it doubles as long as no page comes."""
MAX_BAD_CHUNKS = 8
"""Chunks in a row that may come damaged: then it is not the line."""


@dataclass
class Traffic:
    """Failures of transfers to a worker, since it started."""

    resumed: int = 0
    """Times that a broken transfer went on."""
    bad_chunks: int = 0
    """Chunks that were refused."""


@dataclass(eq=False)
class Guest:
    """This worker's registration with the pool of another node."""

    address: PoolAddress
    pool: PoolStub
    registered: Registered
    heard: float
    """When the pool last answered, in monotonic seconds."""
    owed: set[LeaseId] = field(default_factory=set[LeaseId])
    """Leases that are to be released, if they are held at all."""

    @property
    def id(self) -> WorkerId:
        return self.registered.worker

    @property
    def ttl_s(self) -> float:
        return self.registered.lease_ttl_s


class Fetcher:
    """Copies pages from the arenas of other nodes into that of one worker; any thread may call."""

    def __init__(
        self, pool: WorkerPool, find: Callable[[str], PoolAddress | None], access: Access
    ) -> None:
        """``find`` knows the address of the pool that owns an arena; None: there is none."""
        self._pool, self._find, self._access = pool, find, access
        self.traffic, self.link = Traffic(), LinkMeter()
        self._guests = dict[str, Guest]()
        """By arena."""
        self._lock, self._registering = threading.Lock(), threading.Lock()
        self._closing = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="guest-heartbeat", daemon=True)
        self._heart.start()

    def fetch(
        self,
        label: str,
        lease_ref: LeaseRef,
        ids: PageIds,
        cancelled: Callable[[], bool] = lambda: False,
        about: About = NOTHING_TOLD,
    ) -> tuple[LeaseRef, PageIds]:
        """Copy the pages of a lease here; returns the new lease and its page ids.

        ``about`` is what the pool here is told of them.

        Raises: StaleHandle, NotHeld if the claim is not good; PoolUnavailable, AccessRefused if
            the other pool was out of reach for as long as a lease lasts; Cancelled. Then nothing
            is held, neither here nor there. PoolExhausted
        """
        mine = self._pool.allocate(ids.size)
        try:
            guest = self._guest(lease_ref.arena, lease_ref.lease)
            try:
                guest = self._attach_registered(guest, lease_ref, ids)
                self._copy(guest, lease_ref.lease, ids, mine, cancelled)
                (made,) = self._pool.handoff([(label, mine)], about=[about])
            finally:
                self._release(guest, lease_ref.lease)
        except BaseException:
            if not self._pool.is_lost:
                self._pool.free(mine)
            raise
        return made, mine

    def close(self) -> None:
        """Unregister from all other pools; they reclaim the leases there."""
        self._closing.set()
        self._heart.join()
        with self._lock:
            guests, self._guests = list(self._guests.values()), {}
        for guest in guests:
            with suppress(PoolError):
                guest.pool.call(calls.UnregisterWorker(worker=guest.id))
            guest.pool.close()

    # ---------------------------------------------------------------- the phases

    def _attach_registered(self, guest: Guest, lease_ref: LeaseRef, ids: PageIds) -> Guest:
        """Attach the lease there, as a guest that the pool knows."""
        try:
            self._attach(guest, lease_ref, ids)
        except NotRegistered:  # it was too long since the last sign of life
            self._forget(lease_ref.arena, guest)
            guest = self._guest(lease_ref.arena, lease_ref.lease)
            self._attach(guest, lease_ref, ids)
        return guest

    def _attach(self, guest: Guest, lease_ref: LeaseRef, ids: PageIds) -> None:
        """Attach the lease there. An attempt without an answer may have succeeded."""
        is_unsure = False
        wanted = (calls.LeasePages(lease_ref, PageRanges(ids)),)
        asked = calls.AttachLeases(worker=guest.id, wanted=wanted)

        def attach() -> None:
            nonlocal is_unsure
            try:
                guest.pool.call(asked).exactly(1)
            except PoolUnavailable:
                is_unsure = True
                raise
            except StaleHandle:
                if not is_unsure:
                    raise  # else it may have become stale by our own doing; reading will tell

        self._insist(attach, guest.ttl_s)

    def _copy(
        self,
        guest: Guest,
        lease: LeaseId,
        ids: PageIds,
        mine: PageIds,
        cancelled: Callable[[], bool],
    ) -> None:
        done = bad = 0
        data, page_bytes = self._pool.arena.data, self._pool.page_bytes
        while done < ids.size:
            since = done

            def read() -> None:
                nonlocal done
                start = done
                asked = calls.ReadPages(worker=guest.id, lease=lease, pages=PageRanges(ids[start:]))
                ticket = guest.pool.call(asked).ticket
                at = (guest.address.host, guest.address.pages)
                stream = receive(at, self._access, ticket, lease, data, mine[start:])
                with self.link.transfer(), closing(stream) as chunks:
                    for count in chunks:
                        if cancelled() or self._closing.is_set():
                            raise Cancelled(f"lease {lease}")
                        self._pool.note_fetched((start + count - done) * page_bytes)
                        self.link.arrived((start + count - done) * page_bytes)
                        done = start + count

            try:
                self._insist(read, guest.ttl_s, progress=lambda: done)
            except NotRegistered as error:
                raise StaleHandle(lease, f"its pool took it back: {error}") from error
            except MessageError as error:
                bad = 1 if done > since else bad + 1
                self._count(bad_chunks=1)
                logger.warning("lease %d of another node: %s", lease, error)
                if bad >= MAX_BAD_CHUNKS:
                    raise

    def _insist(
        self, act: Callable[[], R], ttl_s: float, progress: Callable[[], int] = lambda: 0
    ) -> R:
        """Try until it is done, or nothing came of it for as long as a lease lasts."""
        since, before, pause_s = time.monotonic(), progress(), FIRST_PAUSE_S
        while True:
            try:
                return act()
            except AccessRefused:
                raise
            except PoolUnavailable as error:
                now = time.monotonic()
                if progress() > before:
                    since, before, pause_s = now, progress(), FIRST_PAUSE_S
                if now - since > ttl_s or self._closing.wait(pause_s):
                    raise
                self._count(resumed=1)
                logger.info("going on with a pool of another node: %s", error)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _release(self, guest: Guest, lease: LeaseId) -> None:
        """Release a lease there, now or with one of the next heartbeats."""
        with self._lock:
            guest.owed.add(lease)
        with suppress(PoolError, MessageError):
            self._pay(guest)

    def _pay(self, guest: Guest) -> None:
        """Release leases that are still to be released; stale ones count as released."""
        with self._lock:
            owed = sorted(guest.owed)
        for lease in owed:
            with suppress(StaleHandle):
                asked = calls.ReleaseLeases(worker=guest.id, leases=(lease,), keep=False)
                guest.pool.call(asked)
            with self._lock:
                guest.owed.discard(lease)

    def _count(self, resumed: int = 0, bad_chunks: int = 0) -> None:
        with self._lock:
            self.traffic.resumed += resumed
            self.traffic.bad_chunks += bad_chunks

    # ---------------------------------------------------------------- guests

    def _guest(self, arena: str, lease: LeaseId) -> Guest:
        """This worker's registration with the pool of an arena."""
        with self._registering:
            if arena not in self._guests:
                made = self._insist(lambda: self._register(arena, lease), self._pool.lease_ttl_s)
                with self._lock:
                    self._guests[arena] = made
            return self._guests[arena]

    def _register(self, arena: str, lease: LeaseId) -> Guest:
        address = self._find(arena)
        if address is None:
            raise StaleHandle(
                lease, f"no pool has arena {arena}: it was started anew, or never was"
            )
        pool = PoolStub(FrameChannel(str(address), self._access), CONNECT_TIMEOUT_S, wait=False)
        try:
            made = pool.call(calls.RegisterWorker(name=self._pool.worker, process=ELSEWHERE))
            if made.arena != arena:
                raise StaleHandle(lease, f"arena {arena} is gone: its pool was started anew")
            if made.page_bytes != self._pool.page_bytes:
                raise PoolError(
                    f"pages of {made.page_bytes} bytes in arena {arena}, of "
                    f"{self._pool.page_bytes} here: all nodes need the same settings"
                )
        except BaseException:
            pool.close()
            raise
        return Guest(address, pool, made, time.monotonic())

    def _beat(self) -> None:
        while not self._closing.wait(HEARTBEAT_PERIOD_S):
            with self._lock:
                guests = list(self._guests.items())
            for arena, guest in guests:
                if not self._is_welcome(guest):
                    self._forget(arena, guest)

    def _forget(self, arena: str, guest: Guest) -> None:
        with self._lock:
            if self._guests.get(arena) is guest:
                del self._guests[arena]
        guest.pool.close()

    def _is_welcome(self, guest: Guest) -> bool:
        """Renew the registration; whether the pool is there and knows this worker."""
        try:
            guest.pool.call(calls.RenewWorker(worker=guest.id))
            guest.heard = time.monotonic()
            self._pay(guest)
        except PoolUnavailable:
            return time.monotonic() - guest.heard < guest.ttl_s
        except (NotRegistered, MessageError):
            return False
        return True
