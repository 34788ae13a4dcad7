"""Statistics of the pool at one moment: pages by worker and request, and a map of the pages."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from triptych.core.messages import message

MAX_CELLS = 65_535
"""Cells of the largest map: each may have an owner of its own, counted in 16 bits."""

FREE = 0
"""Owner of a page that nobody holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStats:
    """What one worker holds."""

    name: str
    pid: int
    extent_pages: int
    """Its private stock, and whatever it took from there."""
    request_pages: int
    """Pages of requests that it attached, or committed and nobody attached yet."""
    requests: int
    """How many leases of requests that are."""
    silent_s: float
    """Seconds since its last sign of life."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixStats:
    """What is kept of prompts for later requests; those after ``lent_bytes`` count since the
    start."""

    blocks: int = 0
    bytes: int = 0
    borrowed_bytes: int = 0
    """Memory for it that requests have now."""
    hits: int = 0
    """Prompts of which at least one block was known."""
    misses: int = 0
    asked_tokens: int = 0
    """Tokens of all prompts that were looked up."""
    hit_tokens: int = 0
    """Those of them that need not be computed again."""
    evictions: int = 0
    refused: int = 0
    """Prompts of which nothing more could be kept."""
    sessions: int = 0
    """Conversations whose blocks are evicted last, now."""
    session_bytes: int = 0
    """What these may be; blocks of two conversations count twice, evicted ones too."""
    readers: int = 0
    """Requests that read pages of it where they lie, now."""
    shared_bytes: int = 0
    """Those pages, counted for each of them: what they would hold themselves otherwise."""


DISK_SKIPS: tuple[str, ...] = ("staging_full", "queue_full", "load_queue_full")
"""Why a transfer to or from disk may not even be tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskStats:
    """What of it is on disk; those after ``coming`` count since the start of the pool."""

    objects: int = 0
    bytes: int = 0
    capacity_bytes: int = 0
    """0: there is no disk tier."""
    waiting: int = 0
    """Transfers that wait for their turn or are under way."""
    coming: int = 0
    """Blocks on their way into memory."""
    stored: int = 0
    stored_bytes: int = 0
    loaded: int = 0
    """Blocks that were brought back."""
    loaded_bytes: int = 0
    evictions: int = 0
    damaged: int = 0
    """Files that were torn, corrupt or foreign, and were removed."""
    failed: int = 0
    """Blocks that the disk did not take."""
    skipped: dict[str, int] = field(default_factory=dict[str, int])
    """Transfers that were not even tried, by reason (``DISK_SKIPS``)."""
    fault: str = ""
    """Why the disk takes nothing now; empty: it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkStats:
    """What passed to other nodes, and what was turned away, since the start."""

    sent_bytes: int = 0
    """Bytes of pages; what was sent twice counts twice."""
    refused_frames: int = 0
    """Frames that are no question to this pool, from its own node or others."""
    refused_calls: int = 0
    """Calls without the token."""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """All pages, by who holds them. ``free_pages`` and all held pages sum to ``pages``."""

    arena: str
    pages: int
    page_bytes: int
    free_pages: int
    extent_pages: int
    """Held by workers as their private stock."""
    request_pages: int
    """Held by requests, and by prefixes of prompts."""
    workers: tuple[WorkerStats, ...]
    by_request: dict[str, int]
    """Pages by label of the request."""
    by_tenant: dict[str, int] = field(default_factory=dict[str, int])
    """The same pages by digest of the client's key; empty: of nobody with a key."""
    by_format: dict[str, int] = field(default_factory=dict[str, int])
    """The same pages by format, as their producer told at the commit; empty: it told nothing.
    What an answer grows by is in its worker's stock, and of no format here."""
    allocated_total: int
    """Pages that ever left the free list."""
    reclaimed_pages_total: int
    """Pages taken back from workers that died, expired or were expelled."""
    reclaimed_workers_total: int
    prefix: PrefixStats = PrefixStats()
    """Its pages are held by a worker called ``prefix``."""
    disk: DiskStats = DiskStats()
    network: NetworkStats = NetworkStats()

    @property
    def held_pages(self) -> int:
        return self.extent_pages + self.request_pages

    @property
    def faults(self) -> list[str]:
        """Sums that do not come out."""
        wrong = list[str]()
        if self.free_pages + self.held_pages != self.pages:
            wrong.append(f"{self.free_pages} free and {self.held_pages} held pages: {self.pages}")
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
    """Who holds pages, and as what."""

    kind: Literal["extent", "request"]
    """A worker's private stock, or what a request's lease names."""
    worker: str
    label: str
    """The request; empty for a stock."""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class PageMap:
    """Every ``stride``-th page of an arena: a map's size does not grow with the pool.

    A cell tells of one page, the first of ``stride``, and not of a mean of them: what it shows
    was true of that page.
    """

    arena: str
    pages: int
    stride: int
    owners: tuple[OwnerPages, ...]
    packed: bytes
    """A cell for page 0, ``stride``, 2 ``stride`` ...: uint16, little endian. 0: nobody holds it;
    n: it is of ``owners[n - 1]``."""

    def __post_init__(self) -> None:
        if self.stride < 1 or len(self.packed) != 2 * -(-self.pages // self.stride):
            raise ValueError(f"{len(self.packed)} bytes, stride {self.stride}: {self.pages} pages")
        if int(self.cells.max(initial=0)) > len(self.owners):
            raise ValueError(f"a cell of an owner behind the last of {len(self.owners)}")

    @property
    def cells(self) -> NDArray[np.uint16]:
        """The cells, unpacked: (N,)."""
        return np.frombuffer(self.packed, "<u2").astype(np.uint16)
