"""Leases over pages: which lease each page is in, and which pages are free."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NewType

import numpy as np
from numpy.typing import NDArray

from triptych.core.errors import NotHeld, PoolError, StaleHandle
from triptych.core.handles import LeaseId, LeaseRef, arena_ids
from triptych.kvpool.pool.free_list import FreeList, PageIds, count_outside, count_repeated
from triptych.kvpool.pool.processes import ProcessKey
from triptych.kvpool.pool.stats import FREE
from triptych.kvpool.prefix.blocks import FormatPages, PinId

WorkerId = NewType("WorkerId", str)
"""Id of one registration of a worker; never reused, so a worker that registers again is new."""

Commit = tuple[str, PageIds]
"""A request's label, and the pages for its new lease; behind them those that it shares."""

UNSTATED = ""
"""The format of pages whose producer named none."""


@dataclass(frozen=True, slots=True)
class About:
    """Tenant and formats of pages that a producer hands off; used for statistics only."""

    tenant: str = ""
    """Tenant of the request; empty: none, or that of the lease that it continues."""
    formats: FormatPages = ()
    """Pages by format, all of them or none."""

    def by_format(self, pages: int) -> FormatPages:
        """The formats of so many pages; unstated if the counts do not fit."""
        told = sum(count for _, count in self.formats)
        return self.formats if told == pages else ((UNSTATED, pages),)


NOTHING_TOLD = About()


@dataclass(frozen=True, slots=True, eq=False)
class SharedPages:
    """Pages of a cached prefix that a request reads in place, and the pin that keeps them."""

    pin: PinId
    pages: PageIds
    """In ascending order."""


NO_PAGES: PageIds = np.empty(0, np.int32)


@dataclass(slots=True)
class Lease:
    """Pages that belong to a request, or to a worker's extent."""

    id: LeaseId
    kind: Literal["extent", "request"]
    label: str
    worker: "Worker"
    arena: int = 0
    """Index of the arena of a request's own pages. An extent may have pages of several."""
    generation: int = 1
    pages: int = 0
    about: About = NOTHING_TOLD
    committed: PageIds = field(default_factory=NO_PAGES.copy)
    """Pages at the time of the handoff; those that moved on since have another owner."""
    share: SharedPages | None = None
    """Pages that it reads beside its own."""

    @property
    def shared(self) -> PageIds:
        return self.share.pages if self.share else NO_PAGES


@dataclass(slots=True, eq=False)
class Worker:
    """One registration of a worker, and its leases."""

    id: WorkerId
    name: str
    process: ProcessKey
    seen: float
    """Time of its last call; of a dead worker, when it was found dead."""
    keeps: bool
    """Whether its leases wait for a takeover worker when it dies."""
    home: int = 0
    """Index of the arena of its device."""
    extent: Lease = field(init=False)
    requests: dict[LeaseId, Lease] = field(default_factory=dict[LeaseId, Lease])
    unmet_pages: int = 0
    """Pages of its last allocation, if that failed."""
    unmet_arena: int = 0
    """Index of the arena that lacked them."""


class LeaseTable:
    """All pages of a pool: every page is free or in exactly one lease.

    The pool has one arena or several, with consecutive page ids; pages are allocated by arena.

    The methods that begin with ``require`` or return leases check and change nothing; those that
    change something expect checked arguments.
    """

    def __init__(self, sizes: Sequence[int], pool_id: str, *, are_apart: bool = False) -> None:
        """``sizes``: pages of each arena; ``are_apart``: as of ``arena_ids``."""
        pages = sum(sizes)
        self.pages, self.pool_id = pages, pool_id
        self.arenas = arena_ids(pool_id, len(sizes), are_apart=are_apart)
        ends = np.cumsum(sizes)
        self._firsts = ends - sizes
        self.free_lists = tuple(
            FreeList(size, first=int(first))
            for size, first in zip(sizes, self._firsts, strict=True)
        )
        self.owner: NDArray[np.int64] = np.full(pages, FREE, np.int64)
        """The lease of each page. Leases count from 1."""
        self.by_id = dict[LeaseId, Lease]()
        self.let_go: Callable[[PinId], None] = _ignore
        """Called with the pin of shared pages when their last lease ends."""
        self._scratch: PageIds = np.empty(pages, np.int32)
        self._last = 0

    # -------------------------------------------------------------- checks

    def require_distinct(self, worker: Worker, ids: PageIds) -> None:
        wrong = count_outside(ids, self.pages) or count_repeated(ids, self._scratch)
        if wrong:
            raise NotHeld(worker.name, wrong)

    def sources(self, worker: Worker, ids: PageIds) -> list[tuple[Lease, int]]:
        """The worker's leases that the pages are in, with how many are in each."""
        self.require_distinct(worker, ids)
        found = list[tuple[Lease, int]]()
        for owner, count in count_each(self.owner[ids]):
            lease = self.by_id.get(LeaseId(owner))
            if lease is None or lease.worker is not worker:
                raise NotHeld(worker.name, count)
            found.append((lease, count))
        return found

    def arena_of(self, ids: PageIds) -> int:
        """Index of the arena that all these pages are in; that of no pages is 0.

        Raises: PoolError if they are in several
        """
        if len(self.arenas) == 1:
            return 0
        found = np.unique(self._arenas_of(ids))
        if found.size > 1:
            raise PoolError(f"pages of {found.size} arenas: a lease has those of one")
        return int(found[0]) if found.size else 0

    def _arenas_of(self, ids: PageIds) -> NDArray[np.intp]:
        return np.searchsorted(self._firsts, ids, side="right") - 1

    def require_all(self, worker: Worker, leases: Sequence[LeaseId]) -> list[Lease]:
        if len(set(leases)) < len(leases):
            raise StaleHandle(leases[0], "a lease was named twice")
        return [self.require(worker, lease) for lease in leases]

    def require(self, worker: Worker, lease: LeaseId) -> Lease:
        found = self._request(lease)
        if found.worker is not worker:
            raise StaleHandle(lease, f"worker {found.worker.name!r} holds it now")
        return found

    def _request(self, lease: LeaseId) -> Lease:
        found = self.by_id.get(lease)
        if found is None or found.kind != "request":
            raise StaleHandle(lease, "it ended, and its pages were freed")
        return found

    def attachable(self, worker: Worker, lease_ref: LeaseRef, ids: PageIds) -> Lease:
        if lease_ref.arena not in self.arenas:
            raise StaleHandle(lease_ref.lease, "it belongs to an arena that is gone")
        lease = self._request(lease_ref.lease)
        if lease_ref.arena != self.arenas[lease.arena]:
            raise StaleHandle(lease_ref.lease, "its pages are in another arena")
        if lease_ref.generation != lease.generation:
            reason = f"claim of generation {lease_ref.generation}, it is at {lease.generation}"
            raise StaleHandle(lease_ref.lease, reason)
        own = self.own_pages(worker, lease, ids)
        named = int(np.count_nonzero(self.owner[own] == lease.id))
        wrong = max(own.size, lease.pages) - named
        if wrong:
            raise NotHeld(worker.name, wrong)
        return lease

    def own_pages(self, worker: Worker, lease: Lease, ids: PageIds) -> PageIds:
        """The ids before the shared pages of a lease, which must all be there, and last."""
        size = max(0, ids.size - lease.shared.size)
        own, rest = ids[:size], ids[size:]
        self.require_distinct(worker, own)
        if lease.share and not np.array_equal(np.sort(rest), lease.shared):
            raise NotHeld(worker.name, rest.size)
        return own

    def shares_of(
        self,
        worker: Worker,
        commits: Sequence[Commit],
        ending: Sequence[Lease],
        given: Sequence[SharedPages | None],
    ) -> list[SharedPages | None]:
        """The shared pages of each new lease; no pin goes to two of them."""
        left = {lease.label: lease.share for lease in ending if lease.share}
        if not left and not any(given):
            return [None] * len(commits)
        taken = list[SharedPages | None]()
        for index, (label, ids) in enumerate(commits):
            own = given[index] if given else None
            share = own or left.pop(label, None)
            part = self._part_of(worker, ids, share) if share else None
            taken.append(part if part and (own or part.pages.size) else None)
        pins = [share.pin for share in taken if share]
        if len(set(pins)) < len(pins):
            raise PoolError(f"holds {pins} of commits: one was named twice")
        return taken

    def _part_of(self, worker: Worker, ids: PageIds, share: SharedPages) -> SharedPages:
        """The shared pages at the end of some ids; one before an own page is refused."""
        count = int(np.count_nonzero(np.isin(ids, share.pages)))
        named = np.sort(ids[ids.size - count :])
        wrong = int(np.count_nonzero(np.isin(named, share.pages, invert=True)))
        wrong += int(np.count_nonzero(named[1:] == named[:-1]))
        if wrong:
            raise NotHeld(worker.name, wrong)
        return SharedPages(share.pin, named)

    # -------------------------------------------------------------- changes, all checked before

    def open(self, kind: Literal["extent", "request"], label: str, worker: Worker) -> Lease:
        self._last += 1
        lease = Lease(LeaseId(self._last), kind, label, worker)
        self.by_id[lease.id] = lease
        return lease

    def own(self, ids: PageIds, lease: Lease) -> None:
        self.owner[ids] = lease.id
        lease.pages += ids.size

    @property
    def free_pages(self) -> int:
        return sum(map(len, self.free_lists))

    def set_free(self, ids: PageIds) -> None:
        self.owner[ids] = FREE
        if len(self.free_lists) == 1:
            self.free_lists[0].free(ids)
            return
        arenas = self._arenas_of(ids)
        for index in map(int, np.unique(arenas)):
            self.free_lists[index].free(ids[arenas == index])

    def commit(
        self, worker: Worker, label: str, ids: PageIds, about: About, share: SharedPages | None
    ) -> LeaseRef:
        lease = self.open("request", label, worker)
        lease.arena = self.arena_of(ids) if ids.size else worker.home
        lease.about, lease.share = about, share
        lease.committed = ids.copy()
        worker.requests[lease.id] = lease
        self.own(ids, lease)
        return self.lease_ref(lease)

    def end(self, leases: Iterable[Lease], new_owner: Lease | None) -> None:
        for lease in leases:
            left = lease.committed[self.owner[lease.committed] == lease.id]
            if new_owner:
                self.own(left, new_owner)
            else:
                self.set_free(left)
            del self.by_id[lease.id]
            del lease.worker.requests[lease.id]
            self.end_share(lease)

    def drop(self, leases: Sequence[LeaseId]) -> int:
        """End leases of any kind and free their pages; returns how many pages that were."""
        ids = np.flatnonzero(np.isin(self.owner, leases)).astype(np.int32)
        self.set_free(ids)
        for lease in leases:
            self.end_share(self.by_id.pop(lease))
        return ids.size

    def end_share(self, lease: Lease) -> None:
        if lease.share:
            self.let_go(lease.share.pin)

    def lease_ref(self, lease: Lease) -> LeaseRef:
        arena = self.arenas[lease.arena]
        return LeaseRef(arena, lease.id, lease.generation, lease.shared.size)


def without(ids: PageIds, share: SharedPages | None) -> PageIds:
    """The pages of a commit that the new lease owns."""
    return ids[: ids.size - share.pages.size] if share else ids


def count_each(owners: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Distinct values with their counts; fast where, as nearly always, there is only one."""
    if owners.size and bool(np.all(owners == owners[0])):
        return [(int(owners[0]), owners.size)]
    values, counts = np.unique(owners, return_counts=True)
    return list(zip(values.tolist(), counts.tolist(), strict=True))


def _ignore(_: PinId) -> None:
    return
