"""Reports about the pool: statistics, the map of pages, and the check of all tables."""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from triptych.core.handles import LeaseId
from triptych.kvpool.pool.free_list import FreeList
from triptych.kvpool.pool.leases import Lease, LeaseTable, Worker
from triptych.kvpool.pool.stats import FREE, ArenaStats, OwnerPages, PageMap, PoolStats, WorkerStats
from triptych.kvpool.pool.workers import WorkerTable


@dataclass(slots=True)
class Reclaimed:
    """Pages and workers reclaimed after deaths, expired leases and expulsions, since the start."""

    pages: int = 0
    workers: int = 0


def stat(
    leases: LeaseTable, workers: WorkerTable, page_bytes: int, reclaimed: Reclaimed, now: float
) -> PoolStats:
    """Pages by worker, request, tenant and format."""
    by_request, by_tenant, by_format = Counter[str](), Counter[str](), Counter[str]()
    for lease in leases.by_id.values():
        if lease.kind == "request":
            by_request[lease.label] += lease.pages
            by_tenant[lease.about.tenant] += lease.pages
            for name, pages in lease.about.by_format(lease.pages):
                by_format[name] += pages
    lines = tuple(_line(worker, now) for worker in workers.all)
    return PoolStats(
        arena=leases.pool_id,
        pages=leases.pages,
        page_bytes=page_bytes,
        free_pages=leases.free_pages,
        arenas=tuple(
            ArenaStats(arena=name, pages=free.capacity, free_pages=len(free))
            for name, free in zip(leases.arenas, leases.free_lists, strict=True)
        ),
        extent_pages=sum(line.extent_pages for line in lines),
        request_pages=sum(line.request_pages for line in lines),
        workers=lines,
        by_request=dict(by_request),
        by_tenant=dict(by_tenant),
        by_format=dict(by_format),
        allocated_total=sum(free.allocated for free in leases.free_lists),
        reclaimed_pages_total=reclaimed.pages,
        reclaimed_workers_total=reclaimed.workers,
    )


def pages_by_tenant(leases: LeaseTable, label: str) -> dict[str, int]:
    """Pages of the leases with a label, by tenant."""
    pages = Counter[str]()
    for lease in leases.by_id.values():
        if lease.kind == "request" and lease.label == label:
            pages[lease.about.tenant] += lease.pages
    return dict(pages)


def map_pages(leases: LeaseTable, max_entries: int) -> PageMap:
    """The owner of each page; beyond ``max_entries`` pages, of every n-th page."""
    stride = max(1, -(-leases.pages // max_entries))
    owners, at = np.unique(leases.owner[::stride], return_inverse=True)
    lines = dict[OwnerPages, int]()
    index = [
        lines.setdefault(_owner_line(leases.by_id[LeaseId(lease)]), len(lines) + 1)
        if lease != FREE
        else FREE
        for lease in owners.tolist()
    ]
    return PageMap(
        arena=leases.pool_id,
        pages=leases.pages,
        stride=stride,
        owners=tuple(lines),
        packed=np.array(index, "<u2")[at].tobytes(),
    )


def check(leases: LeaseTable, workers: WorkerTable) -> list[str]:
    """Compare all tables with each other; contradictions are returned, one per line."""
    wrong = list[str]()
    free = np.concatenate([each.peek() for each in leases.free_lists])
    if any(leases.arena_of(each.peek()) != at for at, each in _filled(leases)):
        wrong.append("a page is in the free list of another arena")
    if np.unique(free).size != free.size:
        wrong.append("a page is twice in the free list")
    if np.any(leases.owner[free] != FREE):
        wrong.append("a page in the free list has an owner")
    owners, counts = np.unique(leases.owner, return_counts=True)
    pages = dict(zip(owners.tolist(), counts.tolist(), strict=True))
    if pages.pop(FREE, 0) != free.size:
        wrong.append("a page without an owner is not in the free list")
    everybody = workers.all
    for lease in leases.by_id.values():
        if pages.pop(lease.id, 0) != lease.pages:
            wrong.append(f"lease {lease.id} does not count its pages right")
        if lease.kind == "request" and not _lies_in_its_arena(lease, leases):
            wrong.append(f"lease {lease.id} has pages of another arena")
        if lease.worker not in everybody:
            wrong.append(f"lease {lease.id} belongs to a worker that is gone")
        if np.any(leases.owner[lease.shared] == FREE):
            wrong.append(f"lease {lease.id} reads a page that nobody holds")
    wrong += [f"{count} pages belong to no lease ({lease})" for lease, count in pages.items()]
    known = {worker.extent.id for worker in everybody}
    known.update(lease for worker in everybody for lease in worker.requests)
    if known != set(leases.by_id):
        wrong.append("workers and leases do not name each other")
    return wrong


def _filled(leases: LeaseTable) -> list[tuple[int, FreeList]]:
    return [(at, free) for at, free in enumerate(leases.free_lists) if len(free)]


def _lies_in_its_arena(lease: Lease, leases: LeaseTable) -> bool:
    own = lease.committed[leases.owner[lease.committed] == lease.id]
    return not own.size or leases.arena_of(own) == lease.arena


def _owner_line(lease: Lease) -> OwnerPages:
    return OwnerPages(kind=lease.kind, worker=lease.worker.name, label=lease.label)


def _line(worker: Worker, now: float) -> WorkerStats:
    return WorkerStats(
        name=worker.name,
        pid=worker.process.pid,
        extent_pages=worker.extent.pages,
        request_pages=sum(lease.pages for lease in worker.requests.values()),
        requests=len(worker.requests),
        silent_s=max(0.0, now - worker.seen),
    )
