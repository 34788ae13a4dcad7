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
    """Memory for KV pages, allocated in full at start-up."""

    arena_path: str = ""
    """Directory on a disk in which the pages lie, so that they may take more than memory: what was
    read lately stays in memory, and ``decode.selection`` has the rest read when it ranks. Empty: in
    ``/dev/shm``. Who can read it can read prompts while they are served."""

    page_bytes: int | Literal["auto"] = "auto"
    """Bytes of one page; ``auto``: 32 tokens of K8V4 fill it exactly (3,584 at head_dim 64), or for
    ``arena_path`` the next multiple of 4,096."""

    lease_ttl_s: float = 10.0
    """Seconds without a heartbeat after which a worker's pages are taken back."""

    extent_pages: int = 1024
    """Pages that a worker asks for at once; it allocates inside them without asking."""

    prefix_bytes: int | Auto = "auto"
    """Memory of the prefix cache, out of ``kv_cache_memory_bytes``; ``auto``: a quarter;
    0: no prefix is cached."""

    prefix_tenant_bytes: int | Auto = "auto"
    """The most of it that one client's prompts may take; ``auto``: all."""

    prefix_eviction: Literal["cost", "lru"] = "cost"
    """Which prefix goes first when it is full: the one that saves least time per byte, or the one
    that was not used for longest."""

    share_pages: bool = True
    """Whether requests whose prompts begin with a cached prefix read its pages where they lie while
    they decode, so that it is stored once for all of them; else each has a copy, compressed by its
    own attention."""

    keep_answers: Literal["always", "sessions", "never"] = "sessions"
    """Whether answers are kept as prompts are, so that the next turn of a conversation does not
    compute them again: all, those of requests with a ``session_id``, or none."""

    session_ttl_s: float = 300.0
    """Seconds after its last turn for which prefixes of a conversation with a ``session_id`` are
    evicted after all others; 0: they are not."""

    session_tenant_bytes: int | Auto = "auto"
    """The most that one client's conversations have of that; ``auto``: half of
    ``prefix_tenant_bytes``. All clients together have half of ``prefix_bytes``."""

    disk_path: str = ""
    """Directory, of its own, in which prefixes outlive memory and restarts; empty: in none. Who can
    read it can read prompts."""

    disk_bytes: int = 0
    """The most that they take there, in bytes; what was not used for longest goes first."""

    disk_tenant_bytes: int | Auto = "auto"
    """The most of it that one client's prompts may take; ``auto``: all."""

    disk_write_bytes_s: float = 64.0 * MIB
    """Bytes a second at which prefixes are written there; reading, which requests wait for, has no
    limit."""

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
