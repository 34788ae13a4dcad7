"""The pool's calls about cached prefixes: each is a message with a method ``run``.

Meaning and errors are those of ``prefix.cache.PrefixCache`` and ``disk.tier.DiskTier``. A pool
without a prefix cache finds nothing and keeps nothing.
"""

from dataclasses import dataclass
from typing import TypeVar

from triptych.core.messages import CacheMemoryBorrowed, message
from triptych.kvpool.pool.leases import WorkerId
from triptych.kvpool.prefix.blocks import (
    FormatPages,
    Namespace,
    PinId,
    Publication,
    TokenIds,
    decode,
)
from triptych.kvpool.rpc.calls import require_formats, require_short
from triptych.kvpool.rpc.local_pool import LockedPool, PoolCall
from triptych.kvpool.rpc.messages import (
    DONE,
    PoolDone,
    PrefixBlocks,
    PrefixComing,
    PrefixFound,
    PrefixWindows,
)
from triptych.kvpool.rpc.page_ranges import PageRanges

MAX_PREFIX_TOKENS = 1 << 20
MAX_SALT_BYTES = 4096

R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCall(PoolCall[R_co]):
    """A call of a worker about the blocks of some tokens."""

    worker: WorkerId
    namespace: Namespace
    tokens: bytes
    """Packed by ``triptych.kvpool.prefix.blocks.encode``."""

    def __post_init__(self) -> None:
        self._require_prefix()

    def _require_prefix(self) -> None:
        space = self.namespace
        for text in (space.model, space.revision, space.profile):
            require_short(text)
        if len(space.salt) > MAX_SALT_BYTES:
            raise ValueError(f"a salt of {len(space.salt)} bytes: the limit is {MAX_SALT_BYTES}")
        if not 0 <= space.block_tokens <= MAX_PREFIX_TOKENS:
            raise ValueError(f"blocks of {space.block_tokens} tokens")
        if not 0 <= space.window_blocks <= MAX_PREFIX_TOKENS:
            raise ValueError(f"windows of {space.window_blocks} blocks")
        if len(self.tokens) > 4 * MAX_PREFIX_TOKENS:
            raise ValueError(f"{len(self.tokens) // 4} tokens: the limit is {MAX_PREFIX_TOKENS}")
        decode(self.tokens)

    @property
    def token_ids(self) -> TokenIds:
        """The tokens, unpacked."""
        return decode(self.tokens)


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class FindPrefix(PrefixCall[PrefixFound]):
    """Pin the longest cached prefix of a prompt."""

    def run(self, pool: LockedPool) -> PrefixFound:
        tokens = self.token_ids
        with pool.lock:
            pool.heard(self.worker)
            prefixes = pool.prefixes
            found = prefixes.find(self.worker, self.namespace, tokens) if prefixes else None
        return PrefixFound.of(found)


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class PinPrefix(PrefixCall[PrefixFound]):
    """Pin all whole blocks of these tokens."""

    def run(self, pool: LockedPool) -> PrefixFound:
        tokens = self.token_ids
        with pool.lock:
            pool.heard(self.worker)
            prefixes = pool.prefixes
            found = prefixes.pin_all(self.worker, self.namespace, tokens) if prefixes else None
        return PrefixFound.of(found)


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class KnowPrefix(PrefixCall[PrefixBlocks]):
    """Count the blocks of these tokens that are cached."""

    def run(self, pool: LockedPool) -> PrefixBlocks:
        tokens = self.token_ids
        with pool.lock:
            pool.heard(self.worker)
            prefixes = pool.prefixes
            known = prefixes.known(self.worker, self.namespace, tokens) if prefixes else 0
        return PrefixBlocks(blocks=known)


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class KnowWindows(PrefixCall[PrefixWindows]):
    """Find the cached blocks of these tokens that have window entries."""

    def run(self, pool: LockedPool) -> PrefixWindows:
        tokens = self.token_ids
        with pool.lock:
            pool.heard(self.worker)
            if pool.prefixes is None:
                return PrefixWindows(are_cached=())
            known = pool.prefixes.known_windows(self.worker, self.namespace, tokens)
        return PrefixWindows(are_cached=known)


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class PublishPrefix(PrefixCall[PrefixBlocks]):
    """Add the last blocks of these tokens to the cache, or their window entries."""

    blocks: tuple[PageRanges, ...]
    """Pages of each block."""
    seconds: float
    """What each took to compute."""
    tenant: str
    formats: tuple[FormatPages, ...] = ()
    """Pages of each block by format."""
    are_windows: bool = False
    """Whether these are the window entries of the blocks."""

    def __post_init__(self) -> None:
        self._require_prefix()
        require_short(self.tenant)
        for formats in self.formats:
            require_formats(formats)
        if 4 * len(self.blocks) > len(self.tokens):
            raise ValueError(f"{len(self.blocks)} blocks of {len(self.tokens) // 4} tokens")

    def run(self, pool: LockedPool) -> PrefixBlocks:
        new = Publication(
            namespace=self.namespace,
            tokens=self.token_ids,
            blocks=[pages.ids(pool.pages) for pages in self.blocks],
            seconds=self.seconds,
            tenant=self.tenant,
            formats=self.formats,
            are_windows=self.are_windows,
        )
        with pool.lock:
            pool.heard(self.worker)
            if pool.prefixes is None:
                return PrefixBlocks(blocks=0)
            pool.prefixes.end_sessions(pool.now())
            done = pool.prefixes.publish(self.worker, new)
            if pool.disk:
                pool.disk.evicted(done.evicted)
                pool.disk.published(done.new)
        return PrefixBlocks(blocks=done.added)


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePrefix(PrefixCall[PrefixComing]):
    """Load from disk the blocks that continue the cached prefix of a prompt."""

    tenant: str

    def __post_init__(self) -> None:
        self._require_prefix()
        require_short(self.tenant)

    def run(self, pool: LockedPool) -> PrefixComing:
        tokens = self.token_ids
        with pool.lock:
            pool.heard(self.worker)
            if pool.disk is None:
                return PrefixComing(blocks=0, seconds=0.0)
            coming = pool.disk.restore(self.namespace, tokens, self.tenant)
        return PrefixComing(blocks=coming.blocks, seconds=coming.seconds)


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class KeepSession(PrefixCall[PrefixBlocks]):
    """Evict the cached blocks of these tokens last, while the conversation's TTL runs."""

    tenant: str
    session: str

    def __post_init__(self) -> None:
        self._require_prefix()
        require_short(self.tenant)
        require_short(self.session)

    def run(self, pool: LockedPool) -> PrefixBlocks:
        tokens = self.token_ids
        with pool.lock:
            pool.heard(self.worker)
            if pool.prefixes is None:
                return PrefixBlocks(blocks=0)
            now = pool.now()
            pool.prefixes.end_sessions(now)
            kept = pool.prefixes.keep_session(
                self.worker, self.namespace, tokens, self.tenant, self.session, now
            )
        return PrefixBlocks(blocks=kept)


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class ReleasePrefix(PoolCall[PoolDone]):
    worker: WorkerId
    pin: PinId

    def run(self, pool: LockedPool) -> PoolDone:
        with pool.lock:
            pool.heard(self.worker)
            pool.require_prefixes().release(self.worker, self.pin)
        return DONE


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class SetBorrowedMemory(PoolCall[CacheMemoryBorrowed]):
    """Set how many bytes of the prefix cache requests may use, in all; pinned blocks stay."""

    nbytes: int

    def run(self, pool: LockedPool) -> CacheMemoryBorrowed:
        borrowed = 0
        with pool.lock:
            if pool.prefixes:
                borrowed, evicted = pool.prefixes.borrow_cache_memory(self.nbytes)
                if pool.disk:
                    pool.disk.evicted(evicted)
        return CacheMemoryBorrowed(arena=pool.page_pool.pool_id, bytes=borrowed)
