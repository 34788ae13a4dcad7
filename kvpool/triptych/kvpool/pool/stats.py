"""Statistics of the pool at one moment: pages by worker and request, and a map of the pages."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from triptych.core.messages import message

MAX_MAP_ENTRIES = 65_535
"""Entries of the largest map: each may have an owner of its own, counted in 16 bits."""

FREE = 0
"""Owner of a free page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStats:
    """Pages of one worker."""

    name: str
    pid: int
    extent_pages: int
    """Pages of its extent: idle ones, and those that it allocated from there."""
    request_pages: int
    """Pages of request leases that it attached, or handed off and nobody attached yet."""
    requests: int
    """Number of its request leases."""
    silent_s: float
    """Seconds since its last call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixStats:
    """The prefix cache now; fields after ``borrowed_bytes`` count since the start."""

    blocks: int = 0
    windows: int = 0
    """Window entries of blocks."""
    bytes: int = 0
    """Of blocks and window entries."""
    borrowed_bytes: int = 0
    """Bytes of its memory that requests have borrowed now."""
    hits: int = 0
    """Prompts of which at least one block was cached."""
    misses: int = 0
    asked_tokens: int = 0
    """Tokens of all prompts that were looked up."""
    hit_tokens: int = 0
    """Tokens of them that were cached."""
    evictions: int = 0
    refused: int = 0
    """Publications that were refused."""
    sessions: int = 0
    """Conversations whose blocks have a soft pin now."""
    session_bytes: int = 0
    """Their bytes; blocks of two conversations count twice, evicted ones too."""
    readers: int = 0
    """Requests that read pages of it in place, now."""
    shared_bytes: int = 0
    """Bytes of those pages, counted once per request."""


DISK_SKIPS: tuple[str, ...] = ("staging_full", "queue_full", "load_queue_full")
"""Reasons why a transfer to or from disk is skipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskStats:
    """The disk tier of the prefix cache now; fields after ``coming`` count since the start."""

    objects: int = 0
    bytes: int = 0
    capacity_bytes: int = 0
    """0: there is no disk tier."""
    waiting: int = 0
    """Transfers that are queued or under way."""
    coming: int = 0
    """Blocks that are being loaded."""
    stored: int = 0
    stored_bytes: int = 0
    loaded: int = 0
    """Blocks that were loaded."""
    loaded_bytes: int = 0
    evictions: int = 0
    damaged: int = 0
    """Files that were torn, corrupt or foreign, and were removed."""
    failed: int = 0
    """Blocks that could not be written."""
    skipped: dict[str, int] = field(default_factory=dict[str, int])
    """Transfers that were skipped, by reason (``DISK_SKIPS``)."""
    fault: str = ""
    """Why nothing is written to disk now; empty: writes work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkStats:
    """Traffic to other nodes, and refused calls, since the start."""

    sent_bytes: int = 0
    """Bytes of pages; pages that were sent twice count twice."""
    refused_frames: int = 0
    """Frames that are no valid call, from this node or others."""
    refused_calls: int = 0
    """Calls without the token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaStats:
    """Pages of one arena of a pool."""

    arena: str
    pages: int
    free_pages: int


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """All pages by owner. ``free_pages`` and ``held_pages`` sum to ``pages``."""

    arena: str
    """Name of the pool, and of its first arena."""
    pages: int
    page_bytes: int
    free_pages: int
    extent_pages: int
    """Pages of workers' extents."""
    request_pages: int
    """Pages of request leases, and of the prefix cache."""
    workers: tuple[WorkerStats, ...]
    arenas: tuple[ArenaStats, ...] = ()
    """All arenas, the first one in host memory."""
    by_request: dict[str, int]
    """Pages by label of the request."""
    by_tenant: dict[str, int] = field(default_factory=dict[str, int])
    """The same pages by digest of the client's key; empty: no key."""
    by_format: dict[str, int] = field(default_factory=dict[str, int])
    """The same pages by format, as their producer named it at the handoff; empty: it named none.
    Pages that a growing answer allocates are in its worker's extent, and not counted here."""
    allocated_total: int
    """Pages that were ever allocated."""
    reclaimed_pages_total: int
    """Pages reclaimed from workers that died, expired or were expelled."""
    reclaimed_workers_total: int
    prefix: PrefixStats = PrefixStats()
    """Its pages belong to a worker called ``prefix``."""
    disk: DiskStats = DiskStats()
    network: NetworkStats = NetworkStats()

    @property
    def held_pages(self) -> int:
        return self.extent_pages + self.request_pages

    @property
    def faults(self) -> list[str]:
        """Sums that do not add up."""
        wrong = list[str]()
        if self.free_pages + self.held_pages != self.pages:
            wrong.append(f"{self.free_pages} free and {self.held_pages} held pages: {self.pages}")
        for what, total in (("pages", self.pages), ("free_pages", self.free_pages)):
            if self.arenas and sum(getattr(arena, what) for arena in self.arenas) != total:
                wrong.append(f"the {what} of all arenas are not {total}")
        for name in ("request", "tenant", "format"):
            pages = sum(getattr(self, f"by_{name}").values())
            if pages != self.request_pages:
                wrong.append(f"{pages} pages by {name}: requests hold {self.request_pages}")
        return wrong

    @property
    def prefix_pages(self) -> int:
        """Those of ``request_pages`` that hold prefixes of prompts."""
        return self.prefix.bytes // self.page_bytes

    @property
    def free_bytes(self) -> int:
        return self.free_pages * self.page_bytes

    @property
    def held_bytes(self) -> int:
        return self.held_pages * self.page_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerPages:
    """One owner of pages in a map."""

    kind: Literal["extent", "request"]
    """A worker's extent, or a request's lease."""
    worker: str
    label: str
    """The request; empty for an extent."""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class PageMap:
    """Every ``stride``-th page of an arena: a map's size does not grow with the pool.

    An entry is the owner of one page, the first of ``stride``, not a mean of them.
    """

    arena: str
    pages: int
    stride: int
    owners: tuple[OwnerPages, ...]
    packed: bytes
    """An entry for page 0, ``stride``, 2 ``stride`` ...: uint16, little endian. 0: the page is
    free; n: it belongs to ``owners[n - 1]``."""

    def __post_init__(self) -> None:
        if self.stride < 1 or len(self.packed) != 2 * -(-self.pages // self.stride):
            raise ValueError(f"{len(self.packed)} bytes, stride {self.stride}: {self.pages} pages")
        if int(self.entries.max(initial=0)) > len(self.owners):
            raise ValueError(f"an entry of an owner behind the last of {len(self.owners)}")

    @property
    def entries(self) -> NDArray[np.uint16]:
        """The entries, unpacked: (N,)."""
        return np.frombuffer(self.packed, "<u2").astype(np.uint16)
