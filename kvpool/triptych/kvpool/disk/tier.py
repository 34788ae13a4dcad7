"""The level below the cache of prefixes: blocks go to disk behind its back, and come back."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Protocol, Self, TypeVar

from triptych.core.config import PoolConfig
from triptych.core.errors import PoolError
from triptych.kvpool.disk.block_file import ObjectMeta, Pages, page_runs
from triptych.kvpool.disk.io_queue import IoQueue
from triptych.kvpool.disk.store import DiskStore
from triptych.kvpool.pool.free_list import PageIds
from triptych.kvpool.pool.stats import DISK_SKIPS, DiskStats
from triptych.kvpool.prefix.blocks import Block, BlockKey, Namespace, Pin, Publication, TokenIds
from triptych.kvpool.prefix.cache import PrefixCache
from triptych.kvpool.prefix.nodes import usable_lengths

logger = logging.getLogger(__name__)

T = TypeVar("T")

STAGED_BYTES = 64 << 20
"""Most bytes that copies of evicted blocks take until they are written."""
COMPLAIN_EVERY_S = 60.0
LOCK_WAIT_S = 5.0
"""How long a pool that starts waits for the one before it to finish its writes."""
BURST_S = 0.25
"""Seconds of the rate that may be written at once after a pause."""


class Mover(Protocol):
    """Runs transfers in the background; ``IoQueue`` in production."""

    def __len__(self) -> int: ...
    def submit(
        self, work: Callable[[], T], nbytes: int, *, urgent: bool = False
    ) -> "Future[T]": ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSettings:
    """Limits of the disk tier, resolved."""

    path: Path
    capacity_bytes: int
    tenant_bytes: int
    write_bytes_s: float

    @classmethod
    def of(cls, config: PoolConfig) -> Self | None:
        """The settings of a pool; None if it keeps nothing on disk."""
        if not config.disk_path:
            return None
        own = config.disk_tenant_bytes
        return cls(
            path=Path(config.disk_path),
            capacity_bytes=config.disk_bytes,
            tenant_bytes=config.disk_bytes if own == "auto" else own,
            write_bytes_s=config.disk_write_bytes_s,
        )


@dataclass(frozen=True, slots=True)
class Disk:
    """A store, the queue of its transfers, and the pages in memory."""

    tier: DiskStore
    mover: Mover
    pages: Pages

    @classmethod
    def open(cls, settings: DiskSettings, pages: Pages) -> Self:
        """Index the objects of an earlier pool, and start the thread of the transfers.

        Raises: PoolError if the directory cannot be had
        """
        tier = DiskStore(
            settings.path,
            settings.capacity_bytes,
            pages.shape[1],
            settings.tenant_bytes,
            wait_s=LOCK_WAIT_S,
        )
        rate = settings.write_bytes_s
        return cls(tier, IoQueue(rate, rate * BURST_S), pages)

    def close(self) -> None:
        """Finish queued writes, and unlock the directory."""
        self.mover.close()
        self.tier.close()


@dataclass(frozen=True, slots=True)
class Coming:
    """Blocks of a prompt that are being loaded into memory."""

    blocks: int
    seconds: float
    """Seconds to compute them: a request should not wait longer than this."""


@dataclass(frozen=True, slots=True)
class _OnDisk:
    """A block of a prompt, or the window entry of one, that is on disk and not resident."""

    meta: ObjectMeta
    end: int
    """Blocks of the prompt up to this one, or up to that which it is the window entry of."""

    @property
    def key(self) -> BlockKey:
        return BlockKey(self.meta.key)

    @property
    def is_window(self) -> bool:
        return not self.meta.tokens


@dataclass(slots=True, eq=False)
class _Restore:
    """A run of blocks and window entries that are read from disk one after the other."""

    namespace: Namespace
    tokens: TokenIds
    """Of the prompt."""
    tenant: str
    entries: Sequence[_OnDisk]
    pages: list[PageIds]
    pins: list[Pin]
    """On the resident blocks before those that are still to come, and on window entries."""
    arrived: int = 0


class DiskTier:
    """Joins the cache of prefixes with the disk tier.

    What is published is written behind, while it stays in memory: its eviction then costs
    nothing, and a pool that is killed finds it again. A block that is evicted before its turn
    is copied out at once. What does not fit into the line of waiting writes is skipped and
    counted. What is written is a copy: to hold a block for as long as the disk takes would hold
    all blocks before it, and a small cache could keep nothing new meanwhile.

    A restore sets pages aside, reads block after block into them, without the pool's lock, and
    makes each one resident as it arrives. Readers see resident blocks alone.

    All public methods are called with the pool's lock held; the work that the mover runs takes
    it by itself, and never while it waits for the disk.
    """

    def __init__(self, cache: PrefixCache, disk: Disk, lock: threading.Lock) -> None:
        self._cache, self._disk, self._lock = cache, disk, lock
        self._coming = dict[BlockKey, ObjectMeta]()
        """Blocks and window entries that are on their way."""
        self._staged_bytes = 0
        self._skipped = dict.fromkeys(DISK_SKIPS, 0)
        self._fault, self._complained_s = "", float("-inf")

    # -------------------------------------------------------------- to disk

    def published(self, blocks: Sequence[Block]) -> None:
        """Write blocks that have just become resident, unless the disk has them."""
        for block in blocks:
            if not self._disk.tier.touch(block.key):
                self._submit(block, lambda block=block: self._write_resident(block))

    def evicted(self, blocks: Sequence[Block]) -> None:
        """Write evicted blocks to disk, unless it has them; their pages are free from now on."""
        for block in reversed(blocks):
            if self._disk.tier.touch(block.key):
                continue
            if self._staged_bytes + block.nbytes > STAGED_BYTES:
                self._skipped["staging_full"] += 1
                continue
            copy = self._disk.pages[block.pages]
            if self._submit(block, lambda block=block, copy=copy: self._write_copy(block, copy)):
                self._staged_bytes += block.nbytes

    def _submit(self, block: Block, work: Callable[[], None]) -> bool:
        try:
            self._disk.mover.submit(work, block.nbytes)
        except PoolError:
            self._skipped["queue_full"] += 1
            return False
        return True

    def _write_resident(self, block: Block) -> None:
        with self._lock:
            if not self._cache.keeps(block):
                return  # evicted meanwhile, and copied out
            copy = self._disk.pages[block.pages]
        self._store(block, copy)

    def _write_copy(self, block: Block, copy: Pages) -> None:
        try:
            self._store(block, copy)
        finally:
            with self._lock:
                self._staged_bytes -= block.nbytes

    def _store(self, block: Block, pages: Pages) -> None:
        """Write a block; if that fails, only the block is lost."""
        try:
            self._disk.tier.store(_meta_of(block, self._disk.tier.page_bytes), [pages])
        except PoolError as error:
            self._complain(error)
        else:
            self._fault = ""

    def _complain(self, error: PoolError) -> None:
        self._fault, now = str(error), time.monotonic()
        if now - self._complained_s > COMPLAIN_EVERY_S:
            self._complained_s = now
            logger.error("prefixes are not kept on disk: %s", error)

    # -------------------------------------------------------------- from disk

    def restore(self, namespace: Namespace, tokens: TokenIds, tenant: str) -> Coming:
        """Begin to load the blocks that continue the resident prefix of a prompt.

        Call it again until no block is coming any more. At least one token is left to compute.
        What is brought back counts against the quota of ``tenant``.
        """
        tokens = tokens[:-1]
        keys = self._cache.keys(namespace, tokens)
        wanted = self._wanted(namespace, tokens, keys)
        if wanted and wanted[0].key not in self._coming:
            self._begin(namespace, tokens, tenant, keys, wanted)
        coming = list(takewhile(self._coming.__contains__, (one.key for one in wanted)))
        return Coming(len(coming), sum(self._coming[key].seconds for key in coming))

    def _wanted(
        self, namespace: Namespace, tokens: TokenIds, keys: Sequence[BlockKey]
    ) -> list[_OnDisk]:
        """The blocks to load for the longest prefix that memory and disk have together.

        First blocks, then window entries of the last ones, if requests need them.
        """
        first = self._cache.resident(namespace, tokens)
        metas = self._found(namespace, tokens, keys, first)
        blocks = [_OnDisk(meta, end) for end, meta in enumerate(metas, first + 1)]
        if not namespace.window_blocks:
            return blocks
        resident = [*self._cache.windows(namespace, tokens), *(False for _ in blocks)]
        windows = {
            end: _OnDisk(meta, end)
            for end, (is_there, key) in enumerate(zip(resident, keys, strict=False), 1)
            if not is_there and (meta := self._window(namespace, key)) is not None
        }
        are_there = [is_there or end in windows for end, is_there in enumerate(resident, 1)]
        length = max(usable_lengths(are_there, namespace.window_blocks), default=0)
        last = range(max(0, length - namespace.window_blocks) + 1, length + 1)
        return [*blocks[: max(0, length - first)], *(windows[n] for n in last if n in windows)]

    def _begin(
        self,
        namespace: Namespace,
        tokens: TokenIds,
        tenant: str,
        keys: Sequence[BlockKey],
        wanted: Sequence[_OnDisk],
    ) -> None:
        """Reserve pages for blocks on disk, as many as fit, and queue the reads."""
        first = min(self._cache.resident(namespace, tokens), max(one.end for one in wanted))
        pin = self._cache.pin(keys[first - 1]) if first else None
        pages, evicted = self._cache.expect(tenant, [one.meta.pages for one in wanted])
        self.evicted(evicted)
        entries, pins = wanted[: len(pages)], [pin] if pin else []
        run = _Restore(namespace, tokens, tenant, entries, pages, pins)
        if not pages:
            self._give_up(run)
            return
        for one in run.entries:
            self._coming[one.key] = one.meta
        nbytes = sum(one.meta.pages for one in run.entries) * self._disk.tier.page_bytes
        try:
            self._disk.mover.submit(lambda: self._load(run), nbytes, urgent=True)
        except PoolError:
            self._skipped["load_queue_full"] += 1
            self._give_up(run)

    def _found(
        self, namespace: Namespace, tokens: TokenIds, keys: Sequence[BlockKey], first: int
    ) -> Iterator[ObjectMeta]:
        """Consecutive blocks on disk from one on; all fields are compared, not keys alone."""
        space, pieces = namespace.digest(), self._cache.cut(namespace, tokens)
        parent = keys[first - 1] if first else space
        for key, piece in zip(keys[first:], pieces[first:], strict=True):
            meta = self._meta(key)
            if meta is None or (meta.namespace, meta.parent, meta.tokens) != (space, parent, piece):
                return
            yield meta
            parent = key

    def _window(self, namespace: Namespace, block: BlockKey) -> ObjectMeta | None:
        """The window entry of a block, if it is on disk."""
        meta = self._meta(self._cache.window_key(block))
        if meta is None or (meta.namespace, meta.parent) != (namespace.digest(), block):
            return None
        return None if meta.tokens else meta

    def _meta(self, key: BlockKey) -> ObjectMeta | None:
        """The description of an object on disk, or of one that is on its way and gone there."""
        return self._coming.get(key) or self._disk.tier.describe(key)

    def _load(self, run: _Restore) -> None:
        try:
            for one, ids in zip(run.entries, run.pages, strict=True):
                if self._disk.tier.load(one.key, page_runs(self._disk.pages, ids)) is None:
                    break
                with self._lock:
                    self._arrive(run, one, ids)
        except PoolError as error:
            self._complain(error)
        finally:
            with self._lock:
                self._give_up(run)

    def _arrive(self, run: _Restore, one: _OnDisk, ids: PageIds) -> None:
        """Make a block or a window entry resident, and pin it until the last one is.

        The pin of a block covers those before it.
        """
        new = Publication(
            namespace=run.namespace,
            tokens=run.tokens[: one.end * self._cache.block_tokens_of(run.namespace)],
            blocks=[ids],
            seconds=one.meta.seconds,
            tenant=run.tenant,
            are_windows=one.is_window,
        )
        run.arrived += 1
        del self._coming[one.key]
        pin = self._cache.arrive(new)
        if not one.is_window:
            self._let_go(run)
        run.pins += [pin] if pin else []
        if run.arrived == len(run.entries):
            self._let_go(run)

    def _give_up(self, run: _Restore) -> None:
        """Release the pin and the pages of a restore that ends."""
        for one in run.entries[run.arrived :]:
            self._coming.pop(one.key, None)
        self._cache.expect_no_more(run.tenant, run.pages[run.arrived :])
        self._let_go(run)

    def _let_go(self, run: _Restore) -> None:
        for pin in run.pins:
            self._cache.unpin(pin)
        run.pins = []

    # -------------------------------------------------------------- reports

    def line(self) -> DiskStats:
        """The numbers as they are."""
        stat = self._disk.tier.stat()
        return DiskStats(
            objects=stat.objects,
            bytes=stat.nbytes,
            capacity_bytes=stat.capacity_bytes,
            waiting=len(self._disk.mover),
            coming=len(self._coming),
            stored=stat.stored,
            stored_bytes=stat.stored_bytes,
            loaded=stat.loaded,
            loaded_bytes=stat.loaded_bytes,
            evictions=stat.evicted,
            damaged=stat.damaged,
            failed=stat.failed,
            skipped=dict(self._skipped),
            fault=self._fault,
        )


def _meta_of(block: Block, page_bytes: int) -> ObjectMeta:
    return ObjectMeta(
        key=block.key,
        parent=block.parent,
        namespace=block.namespace.digest(),
        tokens=block.tokens,
        tenant=block.tenant,
        pages=block.pages.size,
        page_bytes=page_bytes,
        seconds=block.seconds,
    )
