"""Allocates pages for the next token of every running request and retires old recent pages."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from triptych.core.errors import PageLimitReached, PoolExhausted, TriptychError
from triptych.core.policy import Thresholds
from triptych.kvpool import WorkerPool
from triptych.workers.decode.page_expiry import PageExpiry
from triptych.workers.decode.page_selection import Selector
from triptych.workers.decode.running_batch import RunningRequest
from triptych.workers.decode.window import RECENT, Window
from triptych.workers.kv.block_table import PageTable, Sections
from triptych.workers.kv.device_pages import NO_PAGES
from triptych.workers.kv.handle_codec import small_pages
from triptych.workers.kv.method_tables import MethodTables

Ids = NDArray[np.int32]
Failure = tuple[RunningRequest, TriptychError]
"""A request that got no pages, and the error."""


@dataclass(frozen=True)
class QueuedPlan:
    """The retirement of some requests, which the device plans."""

    window: Window
    requests: Sequence[RunningRequest]
    numbers: Tensor
    """See ``Window.prepare``."""
    positions: Tensor | None
    """See ``PageExpiry.positions``; None: no page of the method expires."""

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors whose numbers the host reads before it carries the plan out."""
        return [self.numbers] if self.positions is None else [self.numbers, self.positions]


class PageGrowth:
    """Page allocation and retirement between two decode steps."""

    def __init__(
        self,
        pool: WorkerPool,
        sections: Sections,
        windows: Mapping[MethodTables, Window],
        selector: Selector | None,
        expiries: Mapping[MethodTables, PageExpiry],
    ) -> None:
        """``windows``: of each method that compresses; raw pages of others are the final ones.
        ``expiries``: of each method whose pages expire.
        """
        self._pool, self._sections = pool, sections
        self._windows, self._selector = windows, selector
        self._expiries = expiries

    def allocate_slots(
        self, batch: Sequence[RunningRequest], plans: Sequence[QueuedPlan], read: Sequence[Ids]
    ) -> Iterator[Failure]:
        """Retire old recent pages, then allocate pages so that every row can take one more token.

        ``plans``: of these requests, and perhaps of others, which are left out. ``read``: their
        tensors, one after another, on the host.

        Yields:  requests that got no pages, with ``PageLimitReached`` or the error of the pool.
                 The caller pauses or frees each before it takes the next one: freed pages may
                 serve the others.
        """
        yield from self._retire_old_pages(batch, plans, iter(read))
        groups = dict[PageTable, list[RunningRequest]]()
        for one in batch:
            recent = one.tables.tables[0]
            if not one.is_paused and recent.length(one.slot) % recent.layout.tokens == 0:
                groups.setdefault(one.tables.recent, []).append(one)
        for table, full in groups.items():
            if self._selector is not None:
                for one in full:
                    self._selector.fill(one.slot, one.tables)
            slots = _slots(full)
            yield from self._grow(full, slots, table, table.tokens_plus_one(slots))

    def allocate_for(self, one: RunningRequest, most: int) -> Ids:
        """Pages for a lowering: ``most``, or fewer if its limit says so; none if the pool has too
        few."""
        spare = one.spare_pages + one.expired_pages.size
        try:
            return self._take_whole([one], [int(max(0, min(most, spare)))])
        except PoolExhausted:
            return NO_PAGES

    def _retire_old_pages(
        self, batch: Sequence[RunningRequest], plans: Sequence[QueuedPlan], read: Iterator[Ids]
    ) -> Iterator[Failure]:
        """Compress the oldest recent pages behind the sink, in each row, once they are older than
        the window."""
        numbers = list[Ids]()
        for plan in plans:
            numbers.append(next(read))
            if plan.positions is not None:
                self._expire(plan.requests, next(read), batch)
        for plan, planned in zip(plans, numbers, strict=True):
            yield from self._retire(plan, planned, batch)

    def queue_plans(self, batch: Sequence[RunningRequest]) -> list[QueuedPlan]:
        """Have the device plan the retirements of requests whose recent pages are full."""
        groups = dict[tuple[Window, Thresholds], list[RunningRequest]]()
        for one in batch:
            window = self._windows.get(one.tables)
            if window is not None and window.is_full(one.slot):
                groups.setdefault((window, one.options.thresholds), []).append(one)
        queued = list[QueuedPlan]()
        for (window, thresholds), full in groups.items():
            slots, expiry = _slots(full), self._expiries.get(full[0].tables)
            seen, most = [one.position for one in full], [one.options.most_tokens for one in full]
            numbers = window.prepare(slots, seen, thresholds, most)
            positions = None if expiry is None else expiry.positions(slots)
            queued.append(QueuedPlan(window, full, numbers, positions))
        return queued

    def settle(self) -> None:
        """End the retirements of a step; see ``Window.settle``."""
        for window in self._windows.values():
            window.settle()

    def _retire(
        self, plan: QueuedPlan, numbers: Ids, batch: Sequence[RunningRequest]
    ) -> Iterator[Failure]:
        """Retire recent pages of requests of one method, as planned.

        The emptied pages are the next ones of the request, and so are those that expire.
        """
        kept = [index for index, one in enumerate(plan.requests) if one in batch]
        if not kept:
            return
        window, full = plan.window, [plan.requests[index] for index in kept]
        slots, tables = _slots(full), full[0].tables
        retirement = window.planned(_slots(plan.requests), numbers).of(kept)
        gone = set[RunningRequest]()
        for failure in self._grow(full, slots, tables.classes, retirement.plan.counts):
            gone.add(failure[0])
            yield failure
        moving = [index for index, one in enumerate(full) if one not in gone]
        if not moving:
            return
        retirement = retirement.of(moving)
        emptied = window.apply(retirement)
        for index, pages in zip(moving, emptied, strict=True):
            one = full[index]
            one.unused_pages = np.concatenate([one.unused_pages, pages])
            self._sections.moved(one.slot)
        if self._selector is not None:
            self._selector.retire(retirement, tables)

    def _expire(
        self, full: Sequence[RunningRequest], positions: Ids, batch: Sequence[RunningRequest]
    ) -> None:
        expiry = self._expiries[full[0].tables]
        for one, mine in zip(full, positions, strict=True):
            if one not in batch:
                continue
            expired = expiry.remove(one.slot, one.position, mine)
            one.expired_pages = np.concatenate([one.expired_pages, expired])

    def _grow(
        self, batch: Sequence[RunningRequest], slots: Ids, table: PageTable, wanted: Ids
    ) -> Iterator[Failure]:
        """Allocate pages so that each row can hold the wanted tokens of each table.

        All requests at once; one after another if the pool has too few pages.
        """
        try:
            self._grow_all(batch, slots, table, wanted)
        except TriptychError as error:
            if len(batch) == 1:
                yield batch[0], error
                return
            for at, one in enumerate(batch):
                only = slice(at, at + 1)
                yield from self._grow([one], slots[only], table, wanted[:, only])

    def _grow_all(
        self, batch: Sequence[RunningRequest], slots: Ids, table: PageTable, wanted: Ids
    ) -> None:
        """Allocate for all requests or none.

        Raises: PoolExhausted, PageLimitReached
        """
        lacking: list[int] = table.count_lacking(slots, wanted).tolist()
        if not any(lacking):
            return
        first = np.array([0, *accumulate(lacking)], np.int64)
        tables = batch[0].tables
        is_recent = table is tables.recent
        take = self._take_recent if is_recent else self._take_whole
        ids = take(batch, lacking)
        table.append_pages(slots, wanted, ids, first)
        for slot in slots.tolist():
            self._sections.moved(slot, tables.places[RECENT] if is_recent else None)

    def _take_recent(self, batch: Sequence[RunningRequest], counts: Sequence[int]) -> Ids:
        """Recent pages for each request: first its unused ones, then newly allocated ones."""
        (layout,) = batch[0].tables.recent.layouts
        short = [
            layout.pool_pages(max(0, count - one.unused_pages.size))
            for one, count in zip(batch, counts, strict=True)
        ]
        fresh = self._take(batch, short)
        taken = list[Ids]()
        for one, count, more in zip(batch, counts, short, strict=True):
            if more:
                new = small_pages(fresh[:more], layout.parts)
                one.unused_pages, fresh = np.concatenate([one.unused_pages, new]), fresh[more:]
            taken.append(one.unused_pages[:count])
            one.unused_pages = one.unused_pages[count:]
        return np.concatenate(taken)

    def _take_whole(self, batch: Sequence[RunningRequest], counts: Sequence[int]) -> Ids:
        """High and low pages for each request: first its expired ones, then newly allocated
        ones."""
        short = [
            max(0, count - one.expired_pages.size) for one, count in zip(batch, counts, strict=True)
        ]
        fresh = self._take(batch, short)
        taken = list[Ids]()
        for one, count, more in zip(batch, counts, short, strict=True):
            taken += [one.expired_pages[: count - more], fresh[:more]]
            one.expired_pages, fresh = one.expired_pages[count - more :], fresh[more:]
        return np.concatenate(taken)

    def _take(self, batch: Sequence[RunningRequest], counts: Sequence[int]) -> Ids:
        """Newly allocated pages of the pool for each request."""
        beyond = [
            count for one, count in zip(batch, counts, strict=True) if count > one.spare_pages
        ]
        if beyond:
            raise PageLimitReached(max(beyond))
        fresh = self._pool.allocate(sum(counts)) if any(counts) else NO_PAGES
        first = 0
        for one, count in zip(batch, counts, strict=True):
            if count:
                one.allocated_pages.append(fresh[first : first + count])
                one.num_pages += count
                first += count
        return fresh


def _slots(batch: Sequence[RunningRequest]) -> Ids:
    return np.array([one.slot for one in batch], np.int32)
