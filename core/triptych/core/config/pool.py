"""The page pool, and what it keeps of requests that are over."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from triptych.core.config.values import GIB, MIB, Auto, require
from triptych.core.layout import PAGE_ALIGN_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """Shape and budget of the pages of one device."""

    kv_cache_memory_bytes: int = GIB
    """Memory for KV pages, allocated in full at start-up; also a size such as ``4GiB``. ``auto``: a
    quarter of the memory that is free, at most what fits into ``/dev/shm``; with ``arena_path``,
    half of the free disk."""

    arena_path: str = ""
    """Directory on a disk for the pages, so that they may exceed memory: recently read pages stay
    in memory, others are read when ``decode.selection`` selects them. Empty: pages are in
    ``/dev/shm``. Anybody who can read the directory can read prompts."""

    arena: Literal["host", "device"] = "host"
    """Where pages are. ``host``: in host memory, and decode keeps copies in its GPU's memory.
    ``device``: ``kv_cache_memory_bytes`` in the memory of each GPU, and only cached prefixes and
    features of images in host memory; all stages need a GPU (``num_gpus``). If the GPUs of a node
    cannot access each other, raw pages alone are there, and as many bytes in host memory are for
    all others, of which decode keeps copies. If it cannot be had, the pool starts as with ``host``.
    Either way it logs why. No GPU has run ``device``."""

    page_bytes: int | Literal["auto"] = "auto"
    """Bytes of one page; ``auto``: 32 tokens of K8V4 fill it exactly (3,584 at head_dim 64), or for
    ``arena_path`` the next multiple of 4,096."""

    lease_ttl_s: float = 10.0
    """Seconds without a heartbeat after which a worker's pages are taken back."""

    extent_pages: int = 1024
    """Pages of one extent: a worker reserves this many with one call and allocates from them
    without further calls."""

    prefix_bytes: int | Auto = "auto"
    """Memory of the prefix cache, part of ``kv_cache_memory_bytes``; ``auto``: a quarter; 0: no
    prefix cache."""

    prefix_tenant_bytes: int | Auto = "auto"
    """Maximum part of ``prefix_bytes`` for one client's prompts; ``auto``: all."""

    prefix_eviction: Literal["cost", "lru"] = "cost"
    """Which prefix of the client with the most bytes is evicted first: ``cost``, the one that saves
    the least time per byte; ``lru``, the least recently used."""

    share_pages: bool = True
    """Whether requests with a common cached prefix read the same pages during decode, stored once.
    If not, each request has its own copy, compressed by its own attention."""

    repeatable_prompts: bool = True
    """Whether a prompt gives the same tokens whether or not its beginning was cached: prefill reads
    whole blocks of a prompt as the cache gives them back, and decode keeps them in the high format.
    If not, the first answer is computed from exact keys and values and its prompt is compressed by
    its own attention; a repeated prompt may then be answered differently."""

    keep_answers: Literal["always", "sessions", "never"] = "sessions"
    """Which answers are added to the prefix cache, so that the next turn of a conversation need not
    prefill them: all (``always``), those of requests with a ``session_id`` (``sessions``), or none
    (``never``). While such a request generates, none of its tokens is downgraded if low tokens have
    no positions, by which its answer is found."""

    session_ttl_s: float = 300.0
    """Seconds after the last turn of a conversation with a ``session_id`` during which its prefixes
    are evicted after all others; 0: no such protection."""

    session_tenant_bytes: int | Auto = "auto"
    """Maximum bytes of one client's prefixes that are protected so; ``auto``: half of
    ``prefix_tenant_bytes``. All clients together: half of ``prefix_bytes``."""

    disk_path: str = ""
    """Directory of the disk tier of the prefix cache, used for nothing else; prefixes there survive
    restarts. Empty: no disk tier. Anybody who can read the directory can read prompts."""

    disk_bytes: int = 0
    """Maximum bytes of the disk tier; the least recently used prefix is evicted first."""

    disk_tenant_bytes: int | Auto = "auto"
    """Maximum part of ``disk_bytes`` for one client's prompts; ``auto``: all."""

    disk_write_bytes_s: float = 64.0 * MIB
    """Maximum rate of writes to the disk tier; reads, which requests wait for, are not limited."""

    def __post_init__(self) -> None:
        require(
            self.kv_cache_memory_bytes > 0,
            "pool.kv_cache_memory_bytes",
            self.kv_cache_memory_bytes,
            "> 0",
        )
        page = self.page_bytes
        fits = page == "auto" or (page > 0 and page % PAGE_ALIGN_BYTES == 0)
        require(fits, "pool.page_bytes", page, f"'auto' or a multiple of {PAGE_ALIGN_BYTES}")
        require(self.lease_ttl_s > 0, "pool.lease_ttl_s", self.lease_ttl_s, "> 0")
        require(self.extent_pages >= 1, "pool.extent_pages", self.extent_pages, ">= 1")
        kept, limit = self.prefix_bytes, self.kv_cache_memory_bytes
        fits = kept == "auto" or 0 <= kept < limit
        require(fits, "pool.prefix_bytes", kept, f"'auto' or 0 to kv_cache_memory_bytes ({limit})")
        own = self.prefix_tenant_bytes
        require(own == "auto" or own >= 0, "pool.prefix_tenant_bytes", own, "'auto' or >= 0")
        ttl_s, most = self.session_ttl_s, self.session_tenant_bytes
        require(ttl_s >= 0, "pool.session_ttl_s", ttl_s, ">= 0")
        require(most == "auto" or most >= 0, "pool.session_tenant_bytes", most, "'auto' or >= 0")
        arena = self.arena_path
        fits = not arena or Path(arena).is_absolute()
        require(fits, "pool.arena_path", arena, "an absolute path, or empty")
        fits = not arena or arena != self.disk_path
        require(fits, "pool.arena_path", arena, "another directory than disk_path")
        fits = self.arena == "host" or not arena
        require(fits, "pool.arena", self.arena, "'host' with an arena_path")
        self._check_disk()

    @property
    def arena_directory(self) -> Path | None:
        """None: where memory is shared."""
        return Path(self.arena_path) if self.arena_path else None

    @property
    def shared_bytes(self) -> int:
        """Page memory where memory is shared."""
        return 0 if self.arena_path else self.kv_cache_memory_bytes

    def _check_disk(self) -> None:
        if not self.disk_path:
            require(self.disk_bytes == 0, "pool.disk_bytes", self.disk_bytes, "0 or a disk_path")
            return
        require(self.disk_bytes > 0, "pool.disk_bytes", self.disk_bytes, "> 0 with a disk_path")
        path = Path(self.disk_path)
        require(path.is_absolute(), "pool.disk_path", self.disk_path, "an absolute path")
        require(self.prefix_bytes != 0, "pool.prefix_bytes", 0, "> 0 with a disk_path")
        own, rate = self.disk_tenant_bytes, self.disk_write_bytes_s
        require(own == "auto" or own >= 0, "pool.disk_tenant_bytes", own, "'auto' or >= 0")
        require(rate > 0, "pool.disk_write_bytes_s", rate, "> 0")
