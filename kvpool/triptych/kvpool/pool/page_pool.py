"""Who holds which page: the pool's books, without clock, lock, socket or bytes."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NewType

import numpy as np
from numpy.typing import NDArray

from triptych.core.errors import NotHeld, NotRegistered, PoolError, PoolExhausted, StaleHandle
from triptych.core.handles import Claim, LeaseId
from triptych.kvpool.pool.free_list import FreeList, PageIds, count_outside, count_repeated
from triptych.kvpool.pool.processes import ProcessKey
from triptych.kvpool.pool.stats import FREE, OwnerPages, PageMap, PoolStats, WorkerStats
from triptych.kvpool.prefix.blocks import FormatPages, HoldId

WorkerId = NewType("WorkerId", str)
"""One registration of a worker; never used again, so a worker that came back is another one."""

Commit = tuple[str, PageIds]
"""A request's label, and the pages that become its own; behind them those that it shares."""

UNSTATED = ""
"""The format of pages of which nobody has said it."""


@dataclass(frozen=True, slots=True)
class About:
    """What a producer says of the pages that it commits, for the books alone."""

    tenant: str = ""
    """Whose request it is; empty: nobody's, or that of the lease that it continues."""
    formats: FormatPages = ()
    """Pages by format, all of them or none."""

    def by_format(self, pages: int) -> FormatPages:
        """What is known of so many pages."""
        told = sum(count for _, count in self.formats)
        return self.formats if told == pages else ((UNSTATED, pages),)


NOTHING_TOLD = About()


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """Pages of somebody else that a request reads, and what keeps them as they are meanwhile."""

    hold: HoldId
    pages: PageIds
    """In ascending order."""


KEEP_S = 60.0
"""How long what a dead worker held waits for another one: longer than one takes to start."""

_FREE = FREE
"""Leases count from 1."""

_NO_PAGES: PageIds = np.empty(0, np.int32)


@dataclass(slots=True)
class _Lease:
    id: LeaseId
    kind: Literal["extent", "request"]
    label: str
    worker: "_Worker"
    generation: int = 1
    pages: int = 0
    about: About = NOTHING_TOLD
    committed: PageIds = field(default_factory=_NO_PAGES.copy)
    """Pages at the time of the commit; those that moved on since have another owner."""
    share: Share | None = None
    """What it reads beside its own pages."""

    @property
    def shared(self) -> PageIds:
        return self.share.pages if self.share else _NO_PAGES


@dataclass(slots=True, eq=False)
class _Worker:
    id: WorkerId
    name: str
    process: ProcessKey
    seen: float
    """Its last sign of life; of one that left its pages to others, when it was found dead."""
    keeps: bool
    """Whether what it holds waits for another worker when it dies."""
    extent: _Lease = field(init=False)
    requests: dict[LeaseId, _Lease] = field(default_factory=dict[LeaseId, _Lease])
    unmet_pages: int = 0
    """Pages that it asked for last and could not get."""


class Pool:
    """A state machine over pages, leases and workers.

    Every page is free or belongs to exactly one lease, and every lease to one worker: an
    *extent* is a worker's private stock, a *request* lease holds one request's pages while
    they pass from stage to stage. Every operation does all that it says or, if it raises,
    nothing. What a worker names is checked against what it holds.

    A decode worker's growing requests draw on its extent: moving each new page into the
    request's lease would cost a call per step.

    What a worker that ``keeps`` held when it died is *left*: nobody can use it, until another
    worker adopts it request by request, or ``keep_s`` has passed, or the dead one is expelled.

    A request may read pages of others beside its own: those of a *share*, which come last wherever
    its pages are named. A share is never owned by its lease, so it is never written, freed or taken
    into stock with it. It belongs to one lease at a time, goes on with the request from lease to
    lease, and ends with the last one, however that ends; then ``let_go`` hears of its hold.

    Units: ``now`` in seconds of any clock that never goes back
    """

    def __init__(
        self,
        pages: int,
        page_bytes: int,
        arena_id: str,
        lease_ttl_s: float,
        keep_s: float = KEEP_S,
    ) -> None:
        self.pages, self.page_bytes = pages, page_bytes
        self.arena_id, self.lease_ttl_s, self.keep_s = arena_id, lease_ttl_s, keep_s
        self._free = FreeList(pages)
        self._owner: NDArray[np.int64] = np.full(pages, _FREE, np.int64)
        self._scratch: PageIds = np.empty(pages, np.int32)
        self._leases = dict[LeaseId, _Lease]()
        self._workers = dict[WorkerId, _Worker]()
        self._names = dict[str, _Worker]()
        self._dead = dict[str, _Worker]()
        """Workers that left pages, by name."""
        self.let_go: Callable[[HoldId], None] = _nobody_asks
        """Told of the hold of each share that ends."""
        self._last_lease = 0
        self._last_worker = 0
        self._reclaimed_pages = 0
        self._reclaimed_workers = 0

    # -------------------------------------------------------------- workers

    def register(
        self, name: str, process: ProcessKey, now: float, *, keeps: bool = False
    ) -> WorkerId:
        """Let a worker in; whoever had the name before loses everything it holds."""
        self.expel(name)
        self._last_worker += 1
        ticket = WorkerId(f"{name}@{self.arena_id}/{self._last_worker}")
        worker = _Worker(ticket, name, process, now, keeps)
        worker.extent = self._open("extent", "", worker)
        self._workers[worker.id] = self._names[name] = worker
        return worker.id

    def renew(self, worker: WorkerId, now: float) -> int:
        """Extend the worker's leases, and say how many pages others lack right now.

        Raises: NotRegistered
        """
        self.hear(worker, now)
        return self._lacking(self._worker(worker))

    def hear(self, worker: WorkerId, now: float) -> None:
        """Extend the worker's leases.

        Raises: NotRegistered
        """
        mine = self._worker(worker)
        mine.seen = max(mine.seen, now)

    def unregister(self, worker: WorkerId) -> None:
        """Let a worker go; what it holds becomes free.

        Raises: NotRegistered
        """
        self._drop([self._worker(worker)])

    def expel(self, name: str) -> bool:
        """Take everything back from a worker that is known to be dead, and all that it left."""
        found = [group[name] for group in (self._names, self._dead) if name in group]
        self._reclaim(found)
        return bool(found)

    def sweep(self, now: float, is_alive: Callable[[ProcessKey], bool]) -> list[str]:
        """Take everything back from workers that are dead or were silent for too long.

        What those that keep held is left for others; what nobody adopted in time goes too.

        Returns: the names of the workers that are lost
        """
        lost = [
            worker
            for worker in self._workers.values()
            if now - worker.seen > self.lease_ttl_s or not is_alive(worker.process)
        ]
        self._reclaim([dead for dead in self._dead.values() if now - dead.seen > self.keep_s])
        for worker in lost:
            self._bury(worker, now)
        return [worker.name for worker in lost]

    def silent(self, now: float) -> list[str]:
        """Workers whose leases ran out; they may still run, and must not when pages move on."""
        workers = self._workers.values()
        return [worker.name for worker in workers if now - worker.seen > self.lease_ttl_s]

    def knows(self, name: str) -> bool:
        """Whether a worker of this name lives or left something."""
        return name in self._names or name in self._dead

    def is_registered(self, worker: WorkerId) -> bool:
        """Whether this registration still counts."""
        return worker in self._workers

    def process_of(self, name: str) -> ProcessKey | None:
        """The process behind a name; None if no worker that lives has it."""
        worker = self._names.get(name)
        return worker.process if worker else None

    def mark_dead(self, name: str, now: float) -> None:
        """Shut a worker out that is known to be dead; what it holds is left or taken back."""
        if name in self._names:
            self._bury(self._names[name], now)

    def adopt(
        self,
        worker: WorkerId,
        previous_worker: str,
        label: str,
        lease: LeaseId | None,
        ids: PageIds,
    ) -> Claim:
        """Give one request of a dead worker to another one: ``ids`` under a lease of its own.

        The ids may come from that request's lease and from the dead worker's extent, on which
        a growing request draws; behind them those that the lease shares, all of them. What else is
        in the lease becomes free. None for ``lease`` is the last one with that label: a worker that
        died while it put the request on offer cannot have noted which one that was.

        Raises: StaleHandle if nothing of it is left; NotHeld, NotRegistered
        """
        mine = self._worker(worker)
        dead = self._dead.get(previous_worker)
        left = _left_by(dead, lease, label) if dead else None
        if dead is None or left is None:
            raise StaleHandle(lease or 0, f"worker {previous_worker!r} left nothing of {label!r}")
        own = self._own_pages(mine, left, ids)
        held = {left.id: left, dead.extent.id: dead.extent}
        counts = _count_each(self._owner[own])
        wrong = sum(count for owner, count in counts if owner not in held)
        if wrong:
            raise NotHeld(previous_worker, wrong)
        for owner, count in counts:
            held[LeaseId(owner)].pages -= count
        share, left.share = left.share, None
        claim = self._commit(mine, label, own, About(left.about.tenant), share)
        self._end([left], None)
        return claim

    # -------------------------------------------------------------- extents

    def grant(self, worker: WorkerId, pages: int, at_least: int | None = None) -> PageIds:
        """Move free pages to the worker's extent: ``pages``, or fewer but ``at_least``.

        While others lack pages, nobody gets more than it needs.

        Shapes:  -> (N,), at_least <= N <= pages
        Raises:  PoolExhausted, NotRegistered
        """
        mine = self._worker(worker)
        needed = pages if at_least is None else at_least
        if needed > len(self._free):
            mine.unmet_pages = needed
            raise PoolExhausted(needed, len(self._free))
        mine.unmet_pages = 0
        count = needed if self._lacking(mine) else max(needed, min(pages, len(self._free)))
        ids = self._free.take(count)
        self._own(ids, mine.extent)
        return ids

    def give_back(self, worker: WorkerId, ids: PageIds) -> None:
        """Free pages of the worker's extent.

        Raises: NotHeld, NotRegistered
        """
        self.require_extent(worker, ids)
        self._worker(worker).extent.pages -= ids.size
        self._set_free(ids)

    def require_extent(self, worker: WorkerId, ids: PageIds) -> None:
        """Refuse pages that are not of the worker's extent, or are named twice.

        Raises: NotHeld, NotRegistered
        """
        mine = self._worker(worker)
        self._require_distinct(mine, ids)
        foreign = int(np.count_nonzero(self._owner[ids] != mine.extent.id))
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
        shares: Sequence[Share | None] = (),
    ) -> list[Claim]:
        """Put pages under new request leases and end old ones, in one step.

        ``about`` and ``shares`` say something of each commit, in the same order, or of none. The
        last pages of a commit may be some of its share; without one, of the share of an ending
        lease with the same label, if it names any. The new lease has that share from then on.

        The committed pages may come from the worker's extent and from request leases that it
        holds, in any mix. What then is left in the released leases becomes free, or with
        ``keep`` part of the worker's extent. So the raw pages of a request are free again at
        the moment its compressed pages are committed. The new leases stay the worker's until
        somebody attaches them: if it dies before that, they die with it.

        Raises: NotHeld, StaleHandle, NotRegistered
        Source: LeanKV (zombie reclaim)
        """
        mine = self._worker(worker)
        ending = self._held_leases(mine, releases)
        reading = self._shares_of(mine, commits, ending, shares)
        moved = [_without(ids, share) for (_, ids), share in zip(commits, reading, strict=True)]
        sources = self._sources(mine, np.concatenate(moved) if moved else _NO_PAGES)
        for lease, count in sources:
            lease.pages -= count
        passed = {share.hold for share in reading if share}
        for lease in ending:
            if lease.share and lease.share.hold in passed:
                lease.share = None
        tenants = {lease.label: lease.about.tenant for lease, _ in sources} if sources else {}
        claims = list[Claim]()
        for index, (label, _) in enumerate(commits):
            told = about[index] if about else NOTHING_TOLD
            if not told.tenant and tenants.get(label):
                told = replace(told, tenant=tenants[label])
            claims.append(self._commit(mine, label, moved[index], told, reading[index]))
        self._end(ending, mine.extent if keep else None)
        return claims

    def attach(self, worker: WorkerId, wanted: Sequence[tuple[Claim, PageIds]]) -> list[Claim]:
        """Make the worker the holder of leases that others committed; old claims become stale.

        The ids are those that the handle names: they must be exactly the pages of the lease, and
        behind them those that it shares.

        Raises: StaleHandle, NotHeld, NotRegistered
        """
        mine = self._worker(worker)
        leases = [self._attachable(mine, claim, ids) for claim, ids in wanted]
        if len({lease.id for lease in leases}) < len(leases):
            raise StaleHandle(leases[0].id, "the same claim came twice")
        for lease in leases:
            del lease.worker.requests[lease.id]
            mine.requests[lease.id] = lease
            lease.worker = mine
            lease.generation += 1
        return [self._claim(lease) for lease in leases]

    def release(self, worker: WorkerId, leases: Sequence[LeaseId], *, keep: bool = False) -> None:
        """End request leases; their pages become free, or with ``keep`` part of the extent.

        Raises: StaleHandle, NotHeld, NotRegistered
        """
        mine = self._worker(worker)
        self._end(self._held_leases(mine, leases), mine.extent if keep else None)

    def withdraw(self, worker: WorkerId, labels: Sequence[str]) -> list[LeaseId]:
        """End whatever the worker holds of these requests; what others attached is not touched.

        So a stage can cancel a request without knowing whether the next one has it already.

        Raises: NotRegistered
        """
        mine, wanted = self._worker(worker), set(labels)
        ending = [lease for lease in mine.requests.values() if lease.label in wanted]
        self._end(ending, None)
        return [lease.id for lease in ending]

    def withdraw_all(self, worker: WorkerId) -> list[LeaseId]:
        """End whatever the worker holds of any request, also what nobody attached yet.

        Raises: NotRegistered
        """
        ending = list(self._worker(worker).requests.values())
        self._end(ending, None)
        return [lease.id for lease in ending]

    def require_lease(self, worker: WorkerId, lease: LeaseId, ids: PageIds) -> None:
        """Refuse pages that are not of this lease, or a lease that the worker does not hold.

        Raises: StaleHandle, NotHeld, NotRegistered
        """
        mine = self._worker(worker)
        held = self._held_lease(mine, lease)
        self._require_distinct(mine, ids)
        foreign = ids[self._owner[ids] != held.id]
        wrong = int(np.count_nonzero(np.isin(foreign, held.shared, invert=True)))
        if wrong:
            raise NotHeld(mine.name, wrong)

    # -------------------------------------------------------------- reports

    @property
    def free_pages(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def stat(self, now: float) -> PoolStats:
        """The books as they are."""
        by_request, by_tenant, by_format = Counter[str](), Counter[str](), Counter[str]()
        for lease in self._leases.values():
            if lease.kind == "request":
                by_request[lease.label] += lease.pages
                by_tenant[lease.about.tenant] += lease.pages
                for name, pages in lease.about.by_format(lease.pages):
                    by_format[name] += pages
        lines = tuple(_line(worker, now) for worker in self._everybody)
        return PoolStats(
            arena=self.arena_id,
            pages=self.pages,
            page_bytes=self.page_bytes,
            free_pages=len(self._free),
            extent_pages=sum(line.extent_pages for line in lines),
            request_pages=sum(line.request_pages for line in lines),
            workers=lines,
            by_request=dict(by_request),
            by_tenant=dict(by_tenant),
            by_format=dict(by_format),
            taken_total=self._free.taken,
            reclaimed_pages_total=self._reclaimed_pages,
            reclaimed_workers_total=self._reclaimed_workers,
        )

    @property
    def shares(self) -> list[Share]:
        """What requests read of others' pages."""
        return [lease.share for lease in self._leases.values() if lease.share]

    def pages_by_tenant(self, label: str) -> dict[str, int]:
        """Pages of the leases with a label, by whose they are."""
        pages = Counter[str]()
        for lease in self._leases.values():
            if lease.kind == "request" and lease.label == label:
                pages[lease.about.tenant] += lease.pages
        return dict(pages)

    def map(self, max_cells: int) -> PageMap:
        """Whose each page is; of a pool with more than ``max_cells`` pages, every n-th page."""
        stride = max(1, -(-self.pages // max_cells))
        leases, at = np.unique(self._owner[::stride], return_inverse=True)
        lines = dict[OwnerPages, int]()
        index = [
            lines.setdefault(_owner_line(self._leases[LeaseId(lease)]), len(lines) + 1)
            if lease != _FREE
            else FREE
            for lease in leases.tolist()
        ]
        return PageMap(
            arena=self.arena_id,
            pages=self.pages,
            stride=stride,
            owners=tuple(lines),
            packed=np.array(index, "<u2")[at].tobytes(),
        )

    def check(self) -> list[str]:
        """Compare all books with each other and say where they differ; empty: all is well."""
        wrong = list[str]()
        free = self._free.peek()
        if np.unique(free).size != free.size:
            wrong.append("a page is twice in the free list")
        if np.any(self._owner[free] != _FREE):
            wrong.append("a page in the free list has an owner")
        owners, counts = np.unique(self._owner, return_counts=True)
        pages = dict(zip(owners.tolist(), counts.tolist(), strict=True))
        if pages.pop(_FREE, 0) != free.size:
            wrong.append("a page without an owner is not in the free list")
        everybody = self._everybody
        for lease in self._leases.values():
            if pages.pop(lease.id, 0) != lease.pages:
                wrong.append(f"lease {lease.id} does not count its pages right")
            if lease.worker not in everybody:
                wrong.append(f"lease {lease.id} belongs to a worker that is gone")
            if np.any(self._owner[lease.shared] == _FREE):
                wrong.append(f"lease {lease.id} reads a page that nobody holds")
        wrong += [f"{count} pages belong to no lease ({lease})" for lease, count in pages.items()]
        known = {worker.extent.id for worker in everybody}
        known.update(lease for worker in everybody for lease in worker.requests)
        if known != set(self._leases):
            wrong.append("workers and leases do not name each other")
        return wrong

    # -------------------------------------------------------------- checks

    @property
    def _everybody(self) -> list[_Worker]:
        return [*self._workers.values(), *self._dead.values()]

    def _worker(self, worker: WorkerId) -> _Worker:
        try:
            return self._workers[worker]
        except KeyError:
            raise NotRegistered(worker) from None

    def _require_distinct(self, worker: _Worker, ids: PageIds) -> None:
        wrong = count_outside(ids, self.pages) or count_repeated(ids, self._scratch)
        if wrong:
            raise NotHeld(worker.name, wrong)

    def _sources(self, worker: _Worker, ids: PageIds) -> list[tuple[_Lease, int]]:
        """The worker's leases that the pages are in, with how many are in each."""
        self._require_distinct(worker, ids)
        found = list[tuple[_Lease, int]]()
        for owner, count in _count_each(self._owner[ids]):
            lease = self._leases.get(LeaseId(owner))
            if lease is None or lease.worker is not worker:
                raise NotHeld(worker.name, count)
            found.append((lease, count))
        return found

    def _held_leases(self, worker: _Worker, leases: Sequence[LeaseId]) -> list[_Lease]:
        if len(set(leases)) < len(leases):
            raise StaleHandle(leases[0], "a lease was named twice")
        return [self._held_lease(worker, lease) for lease in leases]

    def _held_lease(self, worker: _Worker, lease: LeaseId) -> _Lease:
        found = self._open_request(lease)
        if found.worker is not worker:
            raise StaleHandle(lease, f"worker {found.worker.name!r} holds it now")
        return found

    def _open_request(self, lease: LeaseId) -> _Lease:
        found = self._leases.get(lease)
        if found is None or found.kind != "request":
            raise StaleHandle(lease, "it ended, and its pages were freed")
        return found

    def _attachable(self, worker: _Worker, claim: Claim, ids: PageIds) -> _Lease:
        if claim.arena != self.arena_id:
            raise StaleHandle(claim.lease, "it belongs to an arena that is gone")
        lease = self._open_request(claim.lease)
        if claim.generation != lease.generation:
            reason = f"claim of generation {claim.generation}, it is at {lease.generation}"
            raise StaleHandle(claim.lease, reason)
        own = self._own_pages(worker, lease, ids)
        named = int(np.count_nonzero(self._owner[own] == lease.id))
        wrong = max(own.size, lease.pages) - named
        if wrong:
            raise NotHeld(worker.name, wrong)
        return lease

    def _own_pages(self, worker: _Worker, lease: _Lease, ids: PageIds) -> PageIds:
        """Those before the ones that a lease shares, which must all be there, and last."""
        size = max(0, ids.size - lease.shared.size)
        own, rest = ids[:size], ids[size:]
        self._require_distinct(worker, own)
        if lease.share and not np.array_equal(np.sort(rest), lease.shared):
            raise NotHeld(worker.name, rest.size)
        return own

    def _shares_of(
        self,
        worker: _Worker,
        commits: Sequence[Commit],
        ending: Sequence[_Lease],
        given: Sequence[Share | None],
    ) -> list[Share | None]:
        """What each commit reads from now on; no share goes to two of them."""
        left = {lease.label: lease.share for lease in ending if lease.share}
        if not left and not any(given):
            return [None] * len(commits)
        taken = list[Share | None]()
        for index, (label, ids) in enumerate(commits):
            own = given[index] if given else None
            share = own or left.pop(label, None)
            part = self._part_of(worker, ids, share) if share else None
            taken.append(part if part and (own or part.pages.size) else None)
        holds = [share.hold for share in taken if share]
        if len(set(holds)) < len(holds):
            raise PoolError(f"holds {holds} of commits: one was named twice")
        return taken

    def _part_of(self, worker: _Worker, ids: PageIds, share: Share) -> Share:
        """What some ids name of a share, last of all: what is not behind the others counts as own,
        and is refused as such."""
        count = int(np.count_nonzero(np.isin(ids, share.pages)))
        named = np.sort(ids[ids.size - count :])
        wrong = int(np.count_nonzero(np.isin(named, share.pages, invert=True)))
        wrong += int(np.count_nonzero(named[1:] == named[:-1]))
        if wrong:
            raise NotHeld(worker.name, wrong)
        return Share(share.hold, named)

    # -------------------------------------------------------------- changes, all checked before

    def _open(self, kind: Literal["extent", "request"], label: str, worker: _Worker) -> _Lease:
        self._last_lease += 1
        lease = _Lease(LeaseId(self._last_lease), kind, label, worker)
        self._leases[lease.id] = lease
        return lease

    def _own(self, ids: PageIds, lease: _Lease) -> None:
        self._owner[ids] = lease.id
        lease.pages += ids.size

    def _set_free(self, ids: PageIds) -> None:
        self._owner[ids] = _FREE
        self._free.give(ids)

    def _commit(
        self, worker: _Worker, label: str, ids: PageIds, about: About, share: Share | None
    ) -> Claim:
        lease = self._open("request", label, worker)
        lease.about, lease.share = about, share
        lease.committed = ids.copy()
        worker.requests[lease.id] = lease
        self._own(ids, lease)
        return self._claim(lease)

    def _end(self, leases: Iterable[_Lease], heir: _Lease | None) -> None:
        for lease in leases:
            left = lease.committed[self._owner[lease.committed] == lease.id]
            if heir:
                self._own(left, heir)
            else:
                self._set_free(left)
            del self._leases[lease.id]
            del lease.worker.requests[lease.id]
            self._end_share(lease)

    def _end_share(self, lease: _Lease) -> None:
        if lease.share:
            self.let_go(lease.share.hold)

    def _drop(self, workers: Sequence[_Worker]) -> int:
        """Forget workers and free all that they hold; returns how many pages that were."""
        leases = [worker.extent.id for worker in workers]
        leases += [lease for worker in workers for lease in worker.requests]
        ids = np.flatnonzero(np.isin(self._owner, leases)).astype(np.int32)
        self._set_free(ids)
        for lease in leases:
            self._end_share(self._leases.pop(lease))
        for worker in workers:
            self._forget(worker)
        return ids.size

    def _forget(self, worker: _Worker) -> None:
        group = self._names if worker.id in self._workers else self._dead
        del group[worker.name]
        self._workers.pop(worker.id, None)

    def _bury(self, worker: _Worker, now: float) -> None:
        if not worker.keeps:
            self._reclaim([worker])
            return
        self._forget(worker)
        worker.seen, worker.unmet_pages = now, 0
        self._dead[worker.name] = worker

    def _reclaim(self, workers: Sequence[_Worker]) -> None:
        if workers:
            self._reclaimed_pages += self._drop(workers)
            self._reclaimed_workers += len(workers)

    def _lacking(self, asking: _Worker) -> int:
        """Pages that other workers could not get and that are not free yet."""
        unmet = sum(w.unmet_pages for w in self._workers.values() if w is not asking)
        return max(0, unmet - len(self._free))

    def _claim(self, lease: _Lease) -> Claim:
        return Claim(self.arena_id, lease.id, lease.generation, lease.shared.size)


def _nobody_asks(_: HoldId) -> None:
    return


def _without(ids: PageIds, share: Share | None) -> PageIds:
    """The pages of a commit that are to be its own."""
    return ids[: ids.size - share.pages.size] if share else ids


def _count_each(owners: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Distinct values with their counts; fast where, as nearly always, there is only one."""
    if owners.size and bool(np.all(owners == owners[0])):
        return [(int(owners[0]), owners.size)]
    values, counts = np.unique(owners, return_counts=True)
    return list(zip(values.tolist(), counts.tolist(), strict=True))


def _left_by(dead: _Worker, lease: LeaseId | None, label: str) -> _Lease | None:
    """A request's lease; None: the last one."""
    named = [one for one in dead.requests.values() if one.label == label]
    return next((one for one in reversed(named) if lease in (None, one.id)), None)


def _owner_line(lease: _Lease) -> OwnerPages:
    return OwnerPages(kind=lease.kind, worker=lease.worker.name, label=lease.label)


def _line(worker: _Worker, now: float) -> WorkerStats:
    return WorkerStats(
        name=worker.name,
        pid=worker.process.pid,
        extent_pages=worker.extent.pages,
        request_pages=sum(lease.pages for lease in worker.requests.values()),
        requests=len(worker.requests),
        silent_s=max(0.0, now - worker.seen),
    )
