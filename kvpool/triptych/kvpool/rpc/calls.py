"""The pool's calls about workers, pages and leases: each is a message with a method ``run``.

Meaning and errors are those of ``pool.page_pool.Pool``. Every call of a worker also extends its
leases. A call that raises has changed nothing.
"""

from dataclasses import dataclass

from triptych.core.errors import MessageError
from triptych.core.handles import LeaseId, LeaseRef
from triptych.core.messages import message
from triptych.kvpool.pool.leases import NOTHING_TOLD, About, WorkerId
from triptych.kvpool.pool.processes import ProcessKey
from triptych.kvpool.pool.stats import MAX_MAP_ENTRIES, PageMap, PoolStats
from triptych.kvpool.prefix.blocks import FormatPages, PinId
from triptych.kvpool.rpc.local_pool import LockedPool, PoolCall
from triptych.kvpool.rpc.messages import (
    DONE,
    Checked,
    Expelled,
    Inheritance,
    LeaseRefs,
    PagesAllocated,
    PagesOffered,
    PoolDone,
    Registered,
    Renewed,
    Withdrawn,
)
from triptych.kvpool.rpc.page_ranges import PageRanges

MAX_NAME_CHARS = 256
MAX_CHECKPOINT_BYTES = 1 << 30
MAX_FORMATS = 16


def require_short(text: str) -> None:
    """Raise ValueError for a name that is too long."""
    if len(text) > MAX_NAME_CHARS:
        raise ValueError(f"a name of {len(text)} characters: the limit is {MAX_NAME_CHARS}")


def require_formats(formats: FormatPages) -> None:
    """Raise ValueError for too many formats, a name that is too long, or a negative count."""
    if len(formats) > MAX_FORMATS:
        raise ValueError(f"pages of {len(formats)} formats: the limit is {MAX_FORMATS}")
    for name, pages in formats:
        require_short(name)
        if pages < 0:
            raise ValueError(f"{pages} pages of format {name!r}")


# ------------------------------------------------------------------ workers


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterWorker(PoolCall[Registered]):
    name: str
    process: ProcessKey
    checkpoint_bytes: int = 0
    """Size of the memory for its checkpoint."""
    device: str = ""
    """Where it computes, and its pages are; empty: in host memory."""
    keeps_copies: bool = False
    """Whether it keeps copies of pages on its device, where devices are apart."""

    def __post_init__(self) -> None:
        require_short(self.name)
        require_short(self.device)
        if not 0 <= self.checkpoint_bytes <= MAX_CHECKPOINT_BYTES:
            raise ValueError(
                f"checkpoint_bytes={self.checkpoint_bytes}: 0 to {MAX_CHECKPOINT_BYTES}"
            )

    def run(self, pool: LockedPool) -> Registered:
        return pool.register(
            self.name,
            self.process,
            self.checkpoint_bytes,
            self.device,
            keeps_copies=self.keeps_copies,
        )


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class RenewWorker(PoolCall[Renewed]):
    worker: WorkerId

    def run(self, pool: LockedPool) -> Renewed:
        with pool.lock:
            return Renewed(lacking_pages=pool.page_pool.renew(self.worker, pool.now()))


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class UnregisterWorker(PoolCall[PoolDone]):
    worker: WorkerId

    def run(self, pool: LockedPool) -> PoolDone:
        with pool.lock:
            pool.page_pool.unregister(self.worker)
            pool.forget_lost()
        return DONE


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class ExpelWorker(PoolCall[Expelled]):
    """End a worker's process, and reclaim all its pages."""

    name: str

    def run(self, pool: LockedPool) -> Expelled:
        return Expelled(was_there=pool.expel(self.name))


# ------------------------------------------------------------------ pages


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatePages(PoolCall[PagesAllocated]):
    worker: WorkerId
    pages: int
    at_least: int
    arena: str = ""
    """Empty: the worker's home."""

    def __post_init__(self) -> None:
        require_short(self.arena)
        if not 0 <= self.at_least <= self.pages:
            raise ValueError(f"at_least={self.at_least}: expected 0 to pages={self.pages}")

    def run(self, pool: LockedPool) -> PagesAllocated:
        with pool.lock:
            ids = pool.heard(self.worker).allocate(
                self.worker, self.pages, self.at_least, self.arena
            )
        return PagesAllocated(pages=PageRanges(ids))


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class FreePages(PoolCall[PoolDone]):
    worker: WorkerId
    pages: PageRanges

    def run(self, pool: LockedPool) -> PoolDone:
        ids = self.pages.ids(pool.pages)
        with pool.lock:
            pool.heard(self.worker).free(self.worker, ids)
        return DONE


# ------------------------------------------------------------------ leases


@dataclass(frozen=True, slots=True)
class CommitPages:
    label: str
    pages: PageRanges
    about: About = NOTHING_TOLD
    pin: PinId | None = None
    """A pin of the worker; the last pages are the pinned prefix's."""

    def __post_init__(self) -> None:
        require_short(self.label)
        require_short(self.about.tenant)
        require_formats(self.about.formats)


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class HandOff(PoolCall[LeaseRefs]):
    worker: WorkerId
    commits: tuple[CommitPages, ...]
    releases: tuple[LeaseId, ...]
    keep: bool

    def run(self, pool: LockedPool) -> LeaseRefs:
        commits = [(each.label, each.pages.ids(pool.pages)) for each in self.commits]
        about, pins = [each.about for each in self.commits], [each.pin for each in self.commits]
        with pool.lock:
            pages = pool.heard(self.worker)
            if all(pin is None for pin in pins):
                made = pages.handoff(
                    self.worker, commits, self.releases, keep=self.keep, about=about
                )
            else:
                made = pool.require_prefixes().handoff(
                    self.worker, commits, self.releases, keep=self.keep, about=about, pins=pins
                )
        return LeaseRefs(lease_refs=tuple(made))


@dataclass(frozen=True, slots=True)
class LeasePages:
    lease_ref: LeaseRef
    pages: PageRanges


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class AttachLeases(PoolCall[LeaseRefs]):
    worker: WorkerId
    wanted: tuple[LeasePages, ...]

    def run(self, pool: LockedPool) -> LeaseRefs:
        wanted = [(each.lease_ref, each.pages.ids(pool.pages)) for each in self.wanted]
        with pool.lock:
            made = pool.heard(self.worker).attach(self.worker, wanted)
        return LeaseRefs(lease_refs=tuple(made))


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseLeases(PoolCall[PoolDone]):
    worker: WorkerId
    leases: tuple[LeaseId, ...]
    keep: bool

    def run(self, pool: LockedPool) -> PoolDone:
        with pool.lock:
            pool.heard(self.worker).release(self.worker, self.leases, keep=self.keep)
        return DONE


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class WithdrawRequests(PoolCall[Withdrawn]):
    worker: WorkerId
    labels: tuple[str, ...]

    def run(self, pool: LockedPool) -> Withdrawn:
        with pool.lock:
            ended = pool.heard(self.worker).withdraw(self.worker, self.labels)
        return Withdrawn(leases=tuple(ended))


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class WithdrawAll(PoolCall[Withdrawn]):
    worker: WorkerId

    def run(self, pool: LockedPool) -> Withdrawn:
        with pool.lock:
            ended = pool.heard(self.worker).withdraw_all(self.worker)
        return Withdrawn(leases=tuple(ended))


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class InheritFrom(PoolCall[Inheritance]):
    """End a dead worker's registration, and return its checkpoint."""

    previous_worker: str

    def run(self, pool: LockedPool) -> Inheritance:
        return pool.inherit(self.previous_worker)


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptRequest(PoolCall[LeaseRefs]):
    worker: WorkerId
    previous_worker: str
    label: str
    lease: LeaseId | None
    pages: PageRanges

    def __post_init__(self) -> None:
        require_short(self.label)

    def run(self, pool: LockedPool) -> LeaseRefs:
        ids = self.pages.ids(pool.pages)
        with pool.lock:
            made = pool.heard(self.worker).adopt(
                self.worker, self.previous_worker, self.label, self.lease, ids
            )
        return LeaseRefs(lease_refs=(made,))


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPages(PoolCall[PagesOffered]):
    """Get a ticket for the bytes of these pages of a lease, in this order.

    Only workers of other nodes need one, so the ``gateway`` answers it.
    """

    worker: WorkerId
    lease: LeaseId
    pages: PageRanges

    def run(self, pool: LockedPool) -> PagesOffered:
        raise MessageError("ReadPages is answered for workers of other nodes only")


# ------------------------------------------------------------------ the pool as a whole


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class StatPool(PoolCall[PoolStats]):
    def run(self, pool: LockedPool) -> PoolStats:
        return pool.stat()


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class MapPages(PoolCall[PageMap]):
    """The owner of each page, in so many entries at most."""

    max_entries: int

    def __post_init__(self) -> None:
        if not 1 <= self.max_entries <= MAX_MAP_ENTRIES:
            raise ValueError(f"max_entries={self.max_entries}: expected 1 to {MAX_MAP_ENTRIES}")

    def run(self, pool: LockedPool) -> PageMap:
        with pool.lock:
            return pool.page_pool.map(self.max_entries)


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class CheckPool(PoolCall[Checked]):
    """Compare the pool's tables with each other."""

    def run(self, pool: LockedPool) -> Checked:
        return Checked(faults=tuple(pool.check()))
