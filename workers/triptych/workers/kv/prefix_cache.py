# pyright: reportUnknownMemberType=false
# torch.from_numpy has no type hints.
"""Prefix cache access of a worker: compressor and decode publish blocks, prefill loads them."""

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.core.errors import NotRegistered, PoolError, PoolUnavailable
from triptych.core.messages import Prefix, Request
from triptych.core.pages import PagePlan
from triptych.core.pages.page_layouts import BLOCK_PAGES
from triptych.kernels import NUMERICS_VERSION, transcode
from triptych.kernels.pages import segments
from triptych.kvpool import FoundPrefix, Namespace, PinId, Publication, WorkerPool
from triptych.workers.device import CPU, Device
from triptych.workers.kv.device_pages import DevicePages

logger = logging.getLogger(__name__)

T = TypeVar("T")

Ids = NDArray[np.int32]
PageSlots = tuple[Tensor, Tensor]
"""Page and row in the page of some tokens."""

COPIED_AT_ONCE = 256
"""Pages, about 1 MB, so that what was read stays in the processor's cache until it is written."""

PAGES_VERSION = 2
"""Increase it when the same settings give other bytes: pages on disk outlive the program."""


@dataclass(frozen=True)
class BlockPages:
    """Page ids of consecutive blocks of a cached prefix: high pages, then raw pages of the sink.

    A block has ``block_tokens`` tokens of each head row without a sliding window, its window entry
    those of the others. Only the first block of a prefix has raw pages: copies of the sink's,
    beside the same tokens in high pages.
    """

    high: Ids
    """[head rows, pages of a head row], in the order of the tokens. The page with the end of the
    sink holds that behind its other tokens."""
    sink: Ids
    """[head rows, raw pages of the sink]; empty if the blocks begin behind it."""

    @classmethod
    def of(cls, plan: PagePlan, rows: int, first: int, blocks: Sequence[Ids]) -> Self:
        """Split the page ids of blocks, or of window entries.

        ``rows``: their head rows; ``first``: the index of the first block.

        Raises: PoolError if the number of pages of a block differs from the plan
        """
        indexes = range(first, first + len(blocks))
        if [len(ids) for ids in blocks] != [rows * plan.block_row_pages(at) for at in indexes]:
            raise PoolError("the blocks of a prefix are of another plan")
        count, sink = rows * BLOCK_PAGES, plan.block_row_pages(first) - BLOCK_PAGES
        high = [ids[:count].reshape(rows, BLOCK_PAGES) for ids in blocks]
        return cls(np.concatenate(high, axis=1), blocks[0][count:].reshape(rows, sink))


@dataclass(frozen=True)
class SharedPrefix:
    """Pages of a cached prefix that a request reads in place, and the pin on them."""

    pin: PinId
    counts: Ids
    """Tokens of each head row; 0 in layers with a sliding window."""
    pages: Ids
    """Pages of the head rows that have any, one row after another: full pages, then the one with
    the end of the sink, which is read up to that."""


class TokenSource(Protocol):
    """A source of one sequence's tokens in a worker's pages."""

    def copy_sink(self, rows: Ids, target: Ids) -> None:
        """Fill raw pages with the first tokens of some head rows, [rows, pages of the sink]."""
        ...

    def copy(self, rows: Ids, start: int, count: int, target: PageSlots) -> Tensor | None:
        """Write ``count`` tokens from ``start`` on into slots of high pages, head row by head row.

        Returns: mean attention that each received, [rows, count]; None if not needed
        """
        ...


@dataclass(frozen=True)
class RawPages:
    """A ``TokenSource`` over the raw pages of a prompt that the prefill stage wrote."""

    memory: DevicePages
    plan: PagePlan
    pages: Ids
    """All of its raw pages, [head rows, pages]."""
    significance: Tensor | None
    """Mean attention of each token, [head rows, tokens]; None if not needed."""

    def copy_sink(self, rows: Ids, target: Ids) -> None:
        copy_pages(self.memory, self.pages[rows, : target.shape[1]], target)

    def copy(self, rows: Ids, start: int, count: int, target: PageSlots) -> Tensor | None:
        put = self.memory.device.put
        pages = self.pages[rows]
        page, row = map(put, page_slots_of(pages, self.plan.raw.tokens, start, count))
        transcode(self.memory.near, self.plan.raw, self.plan.high, page, row, *target)
        if self.significance is None:
            return None
        return self.significance[put(rows).long(), start : start + count]


@dataclass
class PendingPublication:
    """A sequence whose missing blocks are published, some at a time, and then window entries."""

    prefix: Prefix
    namespace: Namespace
    tokens: Ids
    """Tokens of whole blocks."""
    first: int
    """The next block."""
    last: int
    """The end of the blocks to publish."""
    windows: list[int] = field(default_factory=list[int])
    """Blocks whose window entries are to be published, ascending."""
    source: TokenSource | None = None
    """Source of the tokens of these blocks; required if there are any."""

    @property
    def is_done(self) -> bool:
        return self.blocks_are_done and not self.windows

    @property
    def blocks_are_done(self) -> bool:
        return self.first == self.last

    def next_blocks(self, most: int) -> range:
        """Consecutive blocks that are published next, or whose window entries are."""
        if not self.blocks_are_done:
            return range(self.first, min(self.first + most, self.last))
        first, end = self.windows[0], self.windows[0] + 1
        while end in self.windows[:most]:
            end += 1
        return range(first, end)

    def published(self, blocks: range) -> None:
        """Go on behind blocks, or window entries, that ``next_blocks`` named."""
        if self.blocks_are_done:
            del self.windows[: len(blocks)]
        else:
            self.first = blocks.stop

    def give_up(self) -> None:
        """Publish nothing more."""
        self.last = self.first
        self.windows.clear()


@dataclass
class PrefixStore:
    """A worker's access to the prefix cache of the pool, for one model and one method.

    Prefixes are stored in the high format, whatever the policy: dropped and low tokens depend on
    the request that dropped them. Keys have the plan's ``kv_rotation`` and their position, so any
    sequence that starts with the prefix can use them.
    """

    pool: WorkerPool
    plan: PagePlan
    revision: str
    """Hash of all that decides what the model computes (``ModelFacts.revision``)."""
    arithmetic: str
    """``AppConfig.arithmetic``."""
    """Data type of the model's computation."""
    device: Device = CPU
    skipped: Counter[str] = field(default_factory=Counter[str])
    """Publications that failed, by kind of error."""
    _of_methods: dict[str, "PrefixStore"] = field(default_factory=dict[str, "PrefixStore"])

    def __post_init__(self) -> None:
        self._memory = DevicePages.in_place(self.pool.arena, self.device)
        self._profile = profile_of(self.plan, self.arithmetic)
        windows = np.repeat(np.array(self.plan.windows), self.plan.geometry.kv_heads)
        self._rows: Ids = np.flatnonzero(windows == 0).astype(np.int32)
        """Head rows of a block; the others are those of its window entry."""
        self._window_rows: Ids = np.flatnonzero(windows).astype(np.int32)

    def of_method(self, name: str) -> "PrefixStore":
        """Access to the prefixes of requests of a method; empty: of the default one.

        Raises: UnknownMethod
        """
        plan = self.plan.of_method(name)
        if plan is self.plan:
            return self
        if name not in self._of_methods:
            self._of_methods[name] = replace(self, plan=plan, _of_methods={})
        return self._of_methods[name]

    def namespace(self, cache_salt: str) -> Namespace:
        """The namespace of prefixes that requests with this salt can share."""
        return Namespace(
            salt=cache_salt.encode(),
            model="",
            revision=self.revision,
            profile=self._profile,
            block_tokens=self.plan.block_tokens,
            window_blocks=self.plan.window_blocks,
        )

    # ---------------------------------------------------------------- reading

    def restore(self, request: Request) -> float:
        """Request the restore of prefix blocks of a prompt from disk.

        Returns: seconds that computing the blocks being restored would take; 0 if there are none
        Raises:  PoolUnavailable, NotRegistered
        """
        if not (self.pool.restores and self.plan.caches_prompts):
            return 0.0
        space, tokens = self.namespace(request.cache_salt), _lookable(request)
        coming = self.pool.restore_prefix(space, tokens, request.tenant)
        return coming.seconds if coming.blocks else 0.0

    def load(self, request: Request, raw: Ids, attention: Tensor | None) -> int:
        """Load the cached prefix of a prompt into its raw pages.

        Returns: number of tokens loaded

        In layers with a sliding window, tokens that the rest of the prompt does not read are zeros.

        ``attention`` gets the attention of the prefix's tokens to each other: the stored mean times
        the tokens of the prefix that see each. An approximation: the mean was taken over all of
        the publisher's prompt, and is the largest of the KV head's query heads.

        Shapes:  raw [layers, kv_heads, pages of a head row]; attention [layers, heads, tokens]
        Raises:  PoolUnavailable, NotRegistered
        """
        found = self.pool.find_prefix(self.namespace(request.cache_salt), _lookable(request))
        if found is None:
            return 0
        try:
            self._load(found, raw.reshape(self.plan.geometry.head_rows, -1), attention)
        finally:
            self.device.wait()  # the pages must not be reused while they are read
            self.pool.release_prefix(found.pin)
        return found.tokens

    def share(self, prefix: Prefix, span: range) -> "SharedPrefix | None":
        """Pin the part of a cached prefix that a sequence shares; None if there is none.

        ``span``: the tokens in fixed pages. Blocks that are not in the cache are not shared.

        Raises: PoolUnavailable, NotRegistered
        """
        if not span or not self.plan.shares:
            return None
        tokens = np.frombuffer(prefix.tokens, "<i4")[: span.stop]
        found = self.pool.pin_prefix(self.namespace(prefix.cache_salt), tokens)
        if found is None:
            return None
        try:
            high = BlockPages.of(self.plan, self._rows.size, 0, found.blocks).high
        except PoolError:
            self.pool.release_prefix(found.pin)
            raise
        each = self.plan.high.tokens
        pages = high[:, span.start // each : span.stop // each]
        if self.plan.sink_shift:
            pages = np.roll(pages, -1, axis=1)
        counts: Ids = np.zeros(self.plan.geometry.head_rows, np.int32)
        counts[self._rows] = len(span)
        return SharedPrefix(found.pin, counts, pages.ravel())

    def _load(self, found: FoundPrefix, raw: Ids, attention: Tensor | None) -> None:
        every, windows = range(len(found.blocks)), len(found.windows)
        self._load_rows(self._rows, every, found.blocks, raw, attention)
        if self._window_rows.size:
            last = every[len(every) - windows :]
            self._clear(raw[self._window_rows], last.start * self.plan.block_tokens)
            self._load_rows(self._window_rows, last, found.windows, raw, attention)

    def _load_rows(
        self,
        rows: Ids,
        blocks: range,
        ids: Sequence[Ids],
        raw: Ids,
        attention: Tensor | None,
    ) -> None:
        """Load the tokens of some head rows, which are in blocks or in window entries.

        ``blocks``: the last ones of the prefix; ``ids``: pages of each.
        """
        if not (rows.size and blocks):
            return
        size, pages = self.plan.block_tokens, self._memory.near
        start, count = blocks.start * size, len(blocks) * size
        found = BlockPages.of(self.plan, rows.size, blocks.start, ids)
        high = self._high_slots(found.high, start, count)
        target = self._page_slots(raw[rows], self.plan.raw.tokens, start, count)
        transcode(pages, self.plan.high, self.plan.raw, *high, *target)
        copy_pages(self._memory, found.sink, raw[rows, : found.sink.shape[1]])
        if attention is not None:
            means = segments(pages, self.plan.high).scores[high[0].long(), high[1].long()]
            seen_by = torch.arange(count, 0, -1, dtype=torch.float32, device=means.device)
            sums = means.view(rows.size, 1, count) * seen_by
            by_row = attention.view(len(raw), -1, attention.shape[2])
            by_row[self.device.put(rows).long(), :, start : start + count] = sums

    def _clear(self, raw: Ids, count: int) -> None:
        """Make zeros of the first ``count`` tokens, whose pages had tokens of others before.

        Attention gives them no weight, but reads them.
        """
        each = self.plan.raw.tokens
        used = -(-count // each)
        if not used:
            return
        ids = self.device.put(raw[:, :used].ravel()).long()
        self._memory.near[ids] = 0
        positions = torch.arange(used * each, dtype=torch.int32, device=self.device.name)
        kept = segments(self._memory.near, self.plan.raw).positions
        kept[ids] = positions.view(used, each).repeat(len(raw), 1)

    # ---------------------------------------------------------------- writing

    def publish(self, prefix: Prefix, source: TokenSource) -> None:
        """Publish the whole blocks of a prompt that the pool lacks.

        Raises: PoolUnavailable, NotRegistered
        """
        blocks_before = prefix.cached_tokens // self.plan.block_tokens
        kept = self.begin(prefix, max(0, blocks_before - self.plan.window_blocks))
        if kept is not None:
            kept.source = source
            while not self.publish_next(kept, self._blocks_at_once):
                pass

    def begin(self, prefix: Prefix, first_window: int) -> PendingPublication | None:
        """Find the blocks of a sequence that the pool lacks; None if the pool refused.

        ``first_window``: the first block whose tokens the source has in all layers.

        Raises: PoolUnavailable, NotRegistered
        """
        tokens, size = np.frombuffer(prefix.tokens, "<i4"), self.plan.block_tokens
        last = len(tokens) // size
        whole, namespace = tokens[: last * size], self.namespace(prefix.cache_salt)
        first = self._tried(lambda: self.pool.known_prefix(namespace, whole)) if last else 0
        windows = self._lacking_windows(namespace, whole, range(first_window, last))
        if first is None or windows is None:
            return None
        return PendingPublication(prefix, namespace, whole, first, last, windows)

    def _lacking_windows(
        self, namespace: Namespace, tokens: Ids, blocks: range
    ) -> list[int] | None:
        """Blocks whose window entries the pool lacks; None if it refused."""
        if not (blocks and namespace.window_blocks):
            return []
        cached = self._tried(lambda: self.pool.known_windows(namespace, tokens))
        if cached is None:
            return None
        return [block for block in blocks if block >= len(cached) or not cached[block]]

    def publish_next(self, kept: PendingPublication, most_blocks: int = 1) -> bool:
        """Publish the next blocks or window entries, at most ``most_blocks``; True: none is left.

        If the pool refuses, the failure is counted in ``skipped`` and the rest is dropped.

        Raises: PoolUnavailable, NotRegistered
        """
        if not kept.is_done:
            blocks = kept.next_blocks(most_blocks)
            if self._tried(lambda: self._publish(kept, blocks)):
                kept.published(blocks)
            else:
                kept.give_up()
        if not kept.is_done:
            return False
        if kept.prefix.session and len(kept.tokens):
            self._tried(lambda: self._keep_session(kept))
        return True

    def _tried(self, work: Callable[[], T]) -> T | None:
        """Run ``work``; None if the pool refused, which is counted in ``skipped``."""
        try:
            return work()
        except (PoolUnavailable, NotRegistered):
            raise
        except PoolError as error:
            self.skipped[type(error).__name__] += 1
            logger.debug("a prefix is not published: %s", error)
            return None

    def _keep_session(self, kept: PendingPublication) -> int:
        prefix = kept.prefix
        return self.pool.keep_session(kept.namespace, kept.tokens, prefix.tenant, prefix.session)

    def _publish(self, kept: PendingPublication, blocks: range) -> int:
        """Publish blocks or their window entries; 0 if the pool refused."""
        assert kept.source is not None
        rows = self._window_rows if kept.blocks_are_done else self._rows
        ids = self._take(rows, blocks)
        added = 0
        try:
            if rows.size:
                self._write(rows, blocks, ids, kept.source)
            size = self.plan.block_tokens
            new = Publication(
                namespace=kept.namespace,
                tokens=kept.tokens[: blocks.stop * size],
                blocks=ids,
                seconds=kept.prefix.token_s * size * rows.size / self.plan.geometry.head_rows,
                tenant=kept.prefix.tenant,
                formats=[self._formats(rows, index) for index in blocks],
                are_windows=kept.blocks_are_done,
            )
            added = self.pool.publish_prefix(new)
        finally:
            if not self.pool.is_lost:
                self._give(ids[: len(ids) - added])
        if added < len(ids):
            self.skipped["refused"] += 1
            return 0
        return added

    def _formats(self, rows: Ids, index: int) -> tuple[tuple[str, int], ...]:
        """Pages of some head rows of a block by format."""
        high = rows.size * BLOCK_PAGES
        sink = rows.size * self.plan.block_row_pages(index) - high
        names = self.plan.high.format.name, self.plan.raw.format.name
        return ((names[0], high), (names[1], sink)) if sink else ((names[0], high),)

    @property
    def _blocks_at_once(self) -> int:
        """Blocks that fit in the pages reserved for this worker, at least one.

        So blocks being written never take pages that the router has booked for requests.
        """
        return max(1, self.pool.extent_pages // self.plan.block_pages(0))

    def _take(self, rows: Ids, blocks: range) -> list[Ids]:
        """Pages for some head rows of blocks, all or none."""
        counts = [rows.size * self.plan.block_row_pages(index) for index in blocks]
        return np.split(self.pool.allocate(sum(counts), self.pool.arena.id), np.cumsum(counts)[:-1])

    def _give(self, blocks: list[Ids]) -> None:
        if blocks:
            self.pool.free(np.concatenate(blocks))

    def _write(self, rows: Ids, blocks: range, ids: list[Ids], source: TokenSource) -> None:
        """Encode the tokens of blocks, some head rows in one call."""
        pages = BlockPages.of(self.plan, rows.size, blocks.start, ids)
        start, count = (n * self.plan.block_tokens for n in (blocks.start, len(blocks)))
        target = self._high_slots(pages.high, start, count)
        means = source.copy(rows, start, count, target)
        if pages.sink.size:
            source.copy_sink(rows, pages.sink)
        if means is not None:
            scores = segments(self._memory.near, self.plan.high).scores
            scores[target[0].long(), target[1].long()] = means.flatten()
        self.device.wait()

    def _high_slots(self, pages: Ids, start: int, count: int) -> PageSlots:
        """Page slots of ``count`` tokens of each head row in high pages of blocks, on the device.

        ``start``: position of the first token, the beginning of a block.
        """
        plan, each = self.plan, self.plan.high.tokens
        page, row = page_slots_of(pages, each, 0, count)
        position = np.tile(np.arange(start, start + count, dtype=np.int32), len(pages))
        has_sink = position // each == plan.sink_tokens // each
        row = np.where(has_sink, (row - plan.sink_shift) % each, row).astype(np.int32)
        return self.device.put(page), self.device.put(row)

    def _page_slots(self, pages: Ids, per_page: int, start: int, count: int) -> PageSlots:
        """Page slots of ``count`` tokens from ``start`` on of each head row, on the device."""
        page, row = map(self.device.put, page_slots_of(pages, per_page, start, count))
        return page, row


def copy_pages(memory: DevicePages, source: Ids, target: Ids) -> None:
    """Copy whole pages, ``COPIED_AT_ONCE`` at a time, as words of eight bytes."""
    pages = memory.near.view(torch.int64)
    read, write = (memory.device.put(ids.ravel().astype(np.int64)) for ids in (source, target))
    for start in range(0, len(read), COPIED_AT_ONCE):
        some = slice(start, start + COPIED_AT_ONCE)
        pages.index_copy_(0, write[some], pages.index_select(0, read[some]))


def _lookable(request: Request) -> Ids:
    """Tokens to look up in the prefix cache: the last one is never loaded."""
    limit = 0 if request.is_scored else request.cached_at_most
    keys = request.known_keys
    return np.array(keys if limit is None else keys[: limit + 1], np.int32)


def page_slots_of(pages: Ids, per_page: int, start: int, count: int) -> tuple[Ids, Ids]:
    """Page and row in the page of ``count`` tokens from ``start`` on, head row after head row.

    Shapes:  pages [head rows, M] -> int32 [head rows x count] each
    """
    page, row = np.divmod(np.arange(start, start + count, dtype=np.int32), np.int32(per_page))
    rows = np.broadcast_to(row, (len(pages), count))
    first, second = (np.ascontiguousarray(part).ravel() for part in (pages[:, page], rows))
    return first, second


def profile_of(plan: PagePlan, arithmetic: str) -> str:
    """Digest of everything that the bytes of a prefix's pages depend on."""
    parts = (
        PAGES_VERSION,
        NUMERICS_VERSION,
        plan.high.format,
        plan.high.key_order,
        plan.page_bytes,
        plan.geometry,
        plan.block_sink_pages,
        plan.sink_shift,
        plan.policy.kv_rotation,
        plan.policy.needs_significance,
        arithmetic,
    )
    # Files of prefixes on disk carry this digest: it keeps the class name of earlier releases.
    text = repr(parts).replace("KVRotation(", "Basis(", 1)
    if plan.has_windows:
        text += " with window entries"
    if plan.rounds_prompts:
        text += " rounded"
    if plan.policy.kv_rotation.bases:
        text += f" in bases {hashlib.sha256(plan.policy.kv_rotation.bases).hexdigest()}"
    if plan.policy.kv_rotation.pair_order:
        text += f" of pairs {hashlib.sha256(plan.policy.kv_rotation.pair_order).hexdigest()}"
    if not plan.policy.kv_rotation.rotates_keys:
        text += " keys as they are"
    if plan.policy.scorer is not None:
        text += f" scored by {plan.policy.scorer.tensors}"
    if plan.policy.version > 1:
        text += f" {plan.policy.name} of version {plan.policy.version}"
    return hashlib.sha256(text.encode()).hexdigest()
