"""References to pages that pass between processes instead of the bytes themselves."""

from dataclasses import dataclass
from typing import NewType

LeaseId = NewType("LeaseId", int)


APART = "-apart"
"""How ids of arenas end that no other device has access to."""


def arena_ids(pool: str, count: int, *, are_apart: bool = False) -> tuple[str, ...]:
    """Ids of the arenas of a pool; the first one, in host memory, is called as its pool is.

    ``are_apart``: each of the others is accessed by its own device alone.
    """
    ending = APART if are_apart else ""
    return (pool, *(f"{pool}/{index}{ending}" for index in range(1, count)))


def pool_of(arena: str) -> str:
    """The pool that an arena belongs to."""
    return arena.partition("/")[0]


def is_apart(arena: str) -> bool:
    """Whether an arena is on a device, and no other device has access to it."""
    return arena.endswith(APART)


def can_access(home: str, arena: str) -> bool:
    """Whether workers with this home read and write the pages of an arena.

    Devices have access to host memory, and to each other unless they are apart. Whoever has its
    home in host memory uses the pages there.
    """
    if home == arena:
        return True
    pool = pool_of(home)
    if pool_of(arena) != pool:
        return False
    return arena == pool or (home != pool and not is_apart(home) and not is_apart(arena))


@dataclass(frozen=True, slots=True)
class LeaseRef:
    """The right to a lease's pages: a later ``generation`` makes an earlier reference stale.

    The pool counts ``generation`` up each time the lease changes hands, and never uses a
    lease id twice, so a reference that was kept too long is an error, not a wrong answer.
    """

    arena: str
    """Which arena the pages lie in, unique per pool process and start (``arena_ids``)."""

    lease: LeaseId
    """The lease that they are in."""

    generation: int
    """How often the lease had changed hands when this reference was made."""

    shared: int = 0
    """How many of its pages are not its own, but those of a cached prefix that other requests
    read as well. They come last, wherever the pages of a lease are named."""


@dataclass(frozen=True, slots=True)
class PageRun:
    """Pages of one format of one request, for all its head rows.

    Head rows come in the order (layer, KV head); the pages of a row are consecutive.
    """

    format: str
    """Name of the page format."""

    tokens: bytes
    """Tokens per head row: int32, little endian, one per (layer, KV head)."""

    pages: bytes
    """Page ids, packed by ``triptych.kvpool.rpc.page_ranges.pack``."""

    parts: int = 1
    """Pages of this run in one page of the pool. Several are small pages: number ``i`` of pool page
    ``p`` has the id ``p * parts + i``. A request owns whole pages of the pool."""

    fixed: bool = False
    """Whether these pages are read only, and all of them full: the beginning of a prompt as it
    was cached. Such a run comes last. ``lease_ref.shared`` tells which pages the lease owns."""


@dataclass(frozen=True, slots=True)
class KVHandle:
    """All stored keys and values of one request: what one stage passes to the next."""

    lease_ref: LeaseRef
    """The right to use the pages."""

    runs: tuple[PageRun, ...]
    """The pages by format; one that is fixed comes last."""

    tokens: int
    """Tokens of the sequence that were read so far, dropped ones included."""
