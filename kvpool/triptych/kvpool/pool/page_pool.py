"""The page pool: leases of workers over pages, without clock, lock, socket or bytes."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import numpy as np

from triptych.core.errors import NotHeld, PoolError, PoolExhausted, StaleHandle
from triptych.core.handles import LeaseId, LeaseRef
from triptych.kvpool.pool import reports
from triptych.kvpool.pool.free_list import PageIds
from triptych.kvpool.pool.leases import (
    NO_PAGES,
    NOTHING_TOLD,
    About,
    Commit,
    LeaseTable,
    SharedPages,
    Worker,
    WorkerId,
    count_each,
    without,
)
from triptych.kvpool.pool.processes import ProcessKey
from triptych.kvpool.pool.reports import Reclaimed
from triptych.kvpool.pool.stats import PageMap, PoolStats
from triptych.kvpool.pool.workers import WorkerTable, left_by
from triptych.kvpool.prefix.blocks import PinId

KEEP_S = 60.0
"""How long the leases of a dead worker wait for adoption: longer than a worker takes to start."""


class Pool:
    """A state machine over pages, leases and workers.

    Every page is free or in exactly one lease, and every lease belongs to one worker. An
    *extent* lease has the pages that a worker reserved for its own allocations, a *request* lease
    one request's pages while they pass from stage to stage. A call that raises has changed
    nothing. Every lease and page that a worker names is checked.

    A pool has an arena on each device. A worker has a *home* among them, where it allocates unless
    it names another one. Leases of requests have pages of one arena.

    A decode worker's growing requests use pages of its extent: to move each new page into the
    request's lease would cost a call per step.

    The leases of a dead worker that ``keeps`` them are usable by nobody, until another worker
    adopts them one by one, or ``keep_s`` has passed, or the dead worker is expelled.

    A request may read shared pages of a cached prefix beside its own; they come last wherever its
    pages are named. The lease does not own them, so they are never written or freed with it.
    Their pin belongs to one lease at a time, moves on with the request from lease to lease, and
    ends with the last one; then ``let_go`` is called with it.

    Units: ``now`` in seconds of any clock that never goes back
    """

    def __init__(
        self,
        pages: int | Sequence[int],
        page_bytes: int,
        pool_id: str,
        lease_ttl_s: float,
        keep_s: float = KEEP_S,
        *,
        are_apart: bool = False,
    ) -> None:
        """``pages``: of its arena, or of each of its arenas; ``are_apart``: as of ``arena_ids``."""
        sizes = [pages] if isinstance(pages, int) else pages
        self._leases = LeaseTable(sizes, pool_id, are_apart=are_apart)
        self.are_apart = are_apart
        self.pages, self.page_bytes = self._leases.pages, page_bytes
        self.pool_id, self.lease_ttl_s, self.keep_s = pool_id, lease_ttl_s, keep_s
        self._workers = WorkerTable(pool_id, lease_ttl_s)
        self._reclaimed = Reclaimed()

    @property
    def let_go(self) -> Callable[[PinId], None]:
        """Called with the pin of shared pages when their last lease ends."""
        return self._leases.let_go

    @let_go.setter
    def let_go(self, call: Callable[[PinId], None]) -> None:
        self._leases.let_go = call

    # -------------------------------------------------------------- workers

    def register(
        self,
        name: str,
        process: ProcessKey,
        now: float,
        *,
        keeps: bool = False,
        home: str = "",
    ) -> WorkerId:
        """Register a worker; the worker that had the name before loses all its pages.

        ``home``: the arena of its device; empty: the first one.

        Raises: PoolError if there is no such arena
        """
        index = self._index_of(home) if home else 0
        self.expel(name)
        worker = self._workers.add(name, process, now, keeps=keeps, home=index)
        worker.extent = self._leases.open("extent", "", worker)
        return worker.id

    def renew(self, worker: WorkerId, now: float) -> int:
        """Extend the worker's leases, and return how many pages of its home other workers lack.

        Raises: NotRegistered
        """
        self.hear(worker, now)
        mine = self._workers.require(worker)
        return self._lacking(mine, mine.home)

    def hear(self, worker: WorkerId, now: float) -> None:
        """Extend the worker's leases.

        Raises: NotRegistered
        """
        mine = self._workers.require(worker)
        mine.seen = max(mine.seen, now)

    def unregister(self, worker: WorkerId) -> None:
        """Remove a worker and free its pages.

        Raises: NotRegistered
        """
        self._drop([self._workers.require(worker)])

    def expel(self, name: str) -> bool:
        """Reclaim all pages of a dead worker, also those that wait for adoption.

        Returns: whether the pool knew the worker
        """
        found = self._workers.named(name)
        self._reclaim(found)
        return bool(found)

    def sweep(
        self, now: float, is_alive: Callable[[ProcessKey], bool], fenced: Collection[str] = ()
    ) -> list[str]:
        """Reclaim the pages of workers that are dead, or whose leases have expired.

        Of the latter only those in ``fenced``, which are names from ``silent``: any other one may
        still write into its pages. The pages of a worker that ``keeps`` wait ``keep_s`` for
        adoption first.

        Returns: the names of the workers that are lost
        """
        lost = self._workers.lost(now, is_alive, fenced)
        dead = self._workers.dead.values()
        self._reclaim([worker for worker in dead if now - worker.seen > self.keep_s])
        for worker in lost:
            self._mark_dead(worker, now)
        return [worker.name for worker in lost]

    def silent(self, now: float) -> list[str]:
        """Workers whose leases have expired. Their processes must end before the pages move on."""
        return [worker.name for worker in self._workers.silent(now)]

    def without_pages(self, name: str) -> WorkerId | None:
        """The id of a registered worker that has no pages and waits for none; None if it does."""
        worker = self._workers.by_name.get(name)
        if worker is None or worker.requests or worker.extent.pages or worker.unmet_pages:
            return None
        return worker.id

    def knows(self, name: str) -> bool:
        """Whether a worker of this name is registered or left pages."""
        return bool(self._workers.named(name))

    def is_registered(self, worker: WorkerId) -> bool:
        """Whether this registration is still valid."""
        return worker in self._workers.by_id

    @property
    def processes(self) -> set[ProcessKey]:
        """The processes of all registered workers."""
        return {worker.process for worker in self._workers.by_id.values()}

    def process_of(self, name: str) -> ProcessKey | None:
        """The process of a registered worker; None if no worker has the name."""
        worker = self._workers.by_name.get(name)
        return worker.process if worker else None

    def mark_dead(self, name: str, now: float) -> None:
        """Unregister a dead worker; its pages wait for adoption or are reclaimed."""
        if name in self._workers.by_name:
            self._mark_dead(self._workers.by_name[name], now)

    def adopt(
        self,
        worker: WorkerId,
        previous_worker: str,
        label: str,
        lease: LeaseId | None,
        ids: PageIds,
    ) -> LeaseRef:
        """Move one request of a dead worker to another one: ``ids`` under a new lease.

        The ids may come from that request's lease and from the dead worker's extent, which
        growing requests use; behind them all shared pages of the lease. Other pages of the lease
        become free. None for ``lease`` is the last one with that label: a worker that died during
        a handoff cannot have recorded the new lease.

        Raises: StaleHandle if there is no such lease; NotHeld; PoolError if they are in several
            arenas; NotRegistered
        """
        mine = self._workers.require(worker)
        dead = self._workers.dead.get(previous_worker)
        left = left_by(dead, lease, label) if dead else None
        if dead is None or left is None:
            raise StaleHandle(lease or 0, f"worker {previous_worker!r} left nothing of {label!r}")
        own = self._leases.own_pages(mine, left, ids)
        held = {left.id: left, dead.extent.id: dead.extent}
        counts = count_each(self._leases.owner[own])
        wrong = sum(count for owner, count in counts if owner not in held)
        if wrong:
            raise NotHeld(previous_worker, wrong)
        self._leases.arena_of(own)
        for owner, count in counts:
            held[LeaseId(owner)].pages -= count
        share, left.share = left.share, None
        lease_ref = self._leases.commit(mine, label, own, About(left.about.tenant), share)
        self._leases.end([left], None)
        return lease_ref

    # -------------------------------------------------------------- extents

    def allocate(
        self, worker: WorkerId, pages: int, at_least: int | None = None, arena: str = ""
    ) -> PageIds:
        """Move free pages to the worker's extent: ``pages``, or fewer but ``at_least``.

        They are of the worker's home, unless it names an arena. While other workers lack pages
        there, a worker gets no more than ``at_least``.

        Shapes:  -> (N,), at_least <= N <= pages
        Raises:  PoolExhausted, NotRegistered; PoolError if there is no such arena
        """
        mine = self._workers.require(worker)
        index = self._index_of(arena) if arena else mine.home
        free = self._leases.free_lists[index]
        needed = pages if at_least is None else at_least
        if needed > len(free):
            mine.unmet_pages, mine.unmet_arena = needed, index
            raise PoolExhausted(needed, len(free))
        mine.unmet_pages = 0
        count = needed
        if pages > needed and not self._lacking(mine, index):
            count = min(pages, len(free))
        ids = free.allocate(count)
        self._leases.own(ids, mine.extent)
        return ids

    def free(self, worker: WorkerId, ids: PageIds) -> None:
        """Free pages of the worker's extent.

        Raises: NotHeld, NotRegistered
        """
        self.require_extent(worker, ids)
        self._workers.require(worker).extent.pages -= ids.size
        self._leases.set_free(ids)

    def require_extent(self, worker: WorkerId, ids: PageIds) -> None:
        """Raise if a page is not in the worker's extent, or is named twice.

        Raises: NotHeld, NotRegistered
        """
        mine = self._workers.require(worker)
        self._leases.require_distinct(mine, ids)
        foreign = int(np.count_nonzero(self._leases.owner[ids] != mine.extent.id))
        if foreign:
            raise NotHeld(mine.name, foreign)

    # -------------------------------------------------------------- requests

    def handoff(
        self,
        worker: WorkerId,
        commits: Sequence[Commit],
        releases: Sequence[LeaseId] = (),
        *,
        keep: bool = False,
        about: Sequence[About] = (),
        shares: Sequence[SharedPages | None] = (),
    ) -> list[LeaseRef]:
        """Put pages under new request leases and end old ones, in one step.

        ``about`` and ``shares`` have one entry per commit, in the same order, or none. The last
        pages of a commit may be some of its shared pages; without an entry, those of an ending
        lease with the same label. The new lease has the pin from then on. It has the tenant of the
        lease with the same label that it takes pages of, or that ends, unless ``about`` has one.

        The pages may come from the worker's extent and from its request leases, in any mix. The
        pages left in the released leases become free, or with ``keep`` part of the worker's
        extent. So the raw pages of a request are free again at the moment its compressed pages
        get their lease. The new leases belong to the worker until another one attaches them: if
        it dies before that, they end with it.

        Raises: NotHeld, StaleHandle, NotRegistered; PoolError if a commit has pages of two arenas
        Source: FastCache (zombie reclaim)
        """
        mine = self._workers.require(worker)
        ending = self._leases.require_all(mine, releases)
        reading = self._leases.shares_of(mine, commits, ending, shares)
        moved = [without(ids, share) for (_, ids), share in zip(commits, reading, strict=True)]
        sources = self._leases.sources(mine, np.concatenate(moved) if moved else NO_PAGES)
        for ids in moved:
            self._leases.arena_of(ids)
        for lease, count in sources:
            lease.pages -= count
        passed = {share.pin for share in reading if share}
        for lease in ending:
            if lease.share and lease.share.pin in passed:
                lease.share = None
        continued = [*ending, *(lease for lease, _ in sources)]
        tenants = {lease.label: lease.about.tenant for lease in continued}
        lease_refs = list[LeaseRef]()
        for index, (label, _) in enumerate(commits):
            told = about[index] if about else NOTHING_TOLD
            if not told.tenant and tenants.get(label):
                told = replace(told, tenant=tenants[label])
            lease_refs.append(self._leases.commit(mine, label, moved[index], told, reading[index]))
        self._leases.end(ending, mine.extent if keep else None)
        return lease_refs

    def attach(
        self, worker: WorkerId, wanted: Sequence[tuple[LeaseRef, PageIds]]
    ) -> list[LeaseRef]:
        """Move leases to the worker; earlier references to them become stale.

        The ids are those that the handle names: they must be exactly the pages of the lease, and
        behind them those that it shares.

        Raises: StaleHandle, NotHeld, NotRegistered
        """
        mine = self._workers.require(worker)
        leases = [self._leases.attachable(mine, lease_ref, ids) for lease_ref, ids in wanted]
        if len({lease.id for lease in leases}) < len(leases):
            raise StaleHandle(leases[0].id, "the same claim came twice")
        for lease in leases:
            del lease.worker.requests[lease.id]
            mine.requests[lease.id] = lease
            lease.worker = mine
            lease.generation += 1
        return [self._leases.lease_ref(lease) for lease in leases]

    def release(self, worker: WorkerId, leases: Sequence[LeaseId], *, keep: bool = False) -> None:
        """End request leases; their pages become free, or with ``keep`` part of the extent.

        Raises: StaleHandle, NotHeld, NotRegistered
        """
        mine = self._workers.require(worker)
        self._leases.end(self._leases.require_all(mine, leases), mine.extent if keep else None)

    def withdraw(self, worker: WorkerId, labels: Sequence[str]) -> list[LeaseId]:
        """End all leases that the worker has for these requests.

        Leases that others attached are not touched, so a stage can cancel a request without
        knowing whether the next stage has it already.

        Raises: NotRegistered
        """
        mine, wanted = self._workers.require(worker), set(labels)
        ending = [lease for lease in mine.requests.values() if lease.label in wanted]
        self._leases.end(ending, None)
        return [lease.id for lease in ending]

    def withdraw_all(self, worker: WorkerId) -> list[LeaseId]:
        """End all request leases of the worker, also those that nobody attached yet.

        Raises: NotRegistered
        """
        ending = list(self._workers.require(worker).requests.values())
        self._leases.end(ending, None)
        return [lease.id for lease in ending]

    def require_lease(self, worker: WorkerId, lease: LeaseId, ids: PageIds) -> None:
        """Raise if a page is not in this lease, or the lease is not the worker's.

        Raises: StaleHandle, NotHeld, NotRegistered
        """
        mine = self._workers.require(worker)
        held = self._leases.require(mine, lease)
        self._leases.require_distinct(mine, ids)
        foreign = ids[self._leases.owner[ids] != held.id]
        wrong = int(np.count_nonzero(np.isin(foreign, held.shared, invert=True)))
        if wrong:
            raise NotHeld(mine.name, wrong)

    # -------------------------------------------------------------- reports

    @property
    def free_pages(self) -> int:
        """Pages that are in no lease."""
        return self._leases.free_pages

    def free_at_home(self, worker: WorkerId) -> int:
        """Free pages of the arena where a worker allocates."""
        return len(self._leases.free_lists[self._workers.require(worker).home])

    @property
    def sizes(self) -> tuple[int, ...]:
        """Pages of each arena."""
        return tuple(free.capacity for free in self._leases.free_lists)

    @property
    def arenas(self) -> tuple[str, ...]:
        """Ids of all arenas, in the order of their pages."""
        return self._leases.arenas

    @property
    def shares(self) -> list[SharedPages]:
        """The shares of all leases."""
        return [lease.share for lease in self._leases.by_id.values() if lease.share]

    def stat(self, now: float) -> PoolStats:
        """Pages by worker, request, tenant and format."""
        return reports.stat(self._leases, self._workers, self.page_bytes, self._reclaimed, now)

    def pages_by_tenant(self, label: str) -> dict[str, int]:
        """Pages of the leases with a label, by tenant."""
        return reports.pages_by_tenant(self._leases, label)

    def map(self, max_entries: int) -> PageMap:
        """The owner of each page; beyond ``max_entries`` pages, of every n-th page."""
        return reports.map_pages(self._leases, max_entries)

    def check(self) -> list[str]:
        """Contradictions between the tables; empty if there are none."""
        return reports.check(self._leases, self._workers)

    # -------------------------------------------------------------- end of workers

    def _drop(self, workers: Sequence[Worker]) -> int:
        """Forget workers and free all their pages; returns how many pages that were."""
        leases = [worker.extent.id for worker in workers]
        leases += [lease for worker in workers for lease in worker.requests]
        count = self._leases.drop(leases)
        for worker in workers:
            self._workers.forget(worker)
        return count

    def _mark_dead(self, worker: Worker, now: float) -> None:
        if worker.keeps:
            self._workers.keep_dead(worker, now)
        else:
            self._reclaim([worker])

    def _reclaim(self, workers: Sequence[Worker]) -> None:
        if workers:
            self._reclaimed.pages += self._drop(workers)
            self._reclaimed.workers += len(workers)

    def _lacking(self, asking: Worker, arena: int) -> int:
        """Pages of an arena that other workers could not get and that are not free yet."""
        unmet = self._workers.unmet_pages(asking, arena)
        return max(0, unmet - len(self._leases.free_lists[arena]))

    def _index_of(self, arena: str) -> int:
        if arena not in self._leases.arenas:
            raise PoolError(f"no arena {arena!r}")
        return self._leases.arenas.index(arena)
