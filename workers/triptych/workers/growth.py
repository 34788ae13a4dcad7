"""Pages for the next token of every running request, and old tokens moved out of raw pages."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from triptych.core.errors import TriptychError
from triptych.kvpool import WorkerPool
from triptych.workers.memory import NO_PAGES
from triptych.workers.rows import Sections, SectionTable
from triptych.workers.running import Running
from triptych.workers.selection import Selector
from triptych.workers.window import Window

Ids = NDArray[np.int32]
Ids64 = NDArray[np.int64]
Failure = tuple[Running, TriptychError]
"""Who got no pages, and why."""
Need = tuple[SectionTable, Ids]
"""A table, and the tokens that it is to hold, [layers, requests, kv_heads]."""


class Growth:
    """What a decode worker does to pages between two steps."""

    def __init__(
        self,
        pool: WorkerPool,
        tables: Sequence[SectionTable],
        sections: Sections,
        window: Window | None,
        selector: Selector | None,
    ) -> None:
        """``tables``: raw pages first. ``window``: None if raw pages are the final ones."""
        self._pool, self._tables, self._sections = pool, tables, sections
        self._raw, self._window, self._selector = tables[0], window, selector

    def make_room(self, running: Mapping[str, Running]) -> Iterator[Failure]:
        """Move old tokens out of raw pages, and see that every row can take one more token.

        Yields:  who got no pages. It must be gone before the next one is asked for: its pages may
                 be what others lack.
        """
        if self._window is not None:
            yield from self._retire_old_pages(self._window, list(running.values()))
        room = self._raw.layout.tokens
        full = [one for one in running.values() if self._raw.length(one.slot) % room == 0]
        if not full:
            return
        slots = _slots(full)
        if self._selector is not None:
            for slot in slots.tolist():
                self._selector.fill(slot)
        yield from self._grow(full, slots, [(self._raw, self._raw.tokens[:, slots] + 1)])

    def _retire_old_pages(self, window: Window, batch: Sequence[Running]) -> Iterator[Failure]:
        """Compress the raw page behind the sink, in each row, once it is older than the window."""
        groups = dict[float, list[Running]]()
        for one in batch:
            if window.is_full(one.slot):
                groups.setdefault(one.wanted.alpha_low, []).append(one)
        for alpha_low, full in groups.items():
            yield from self._retire(window, full, alpha_low)

    def _retire(
        self, window: Window, full: Sequence[Running], alpha_low: float
    ) -> Iterator[Failure]:
        """The same for requests whose tokens are judged alike."""
        slots, seen = _slots(full), [one.position for one in full]
        leaving = window.leaving(self._sections, slots, seen, alpha_low)
        counts = leaving.plan.counts
        classes = [(table, counts[..., at]) for at, table in enumerate(self._tables[1:])]
        gone = set[Running]()
        for failure in self._grow(full, slots, classes):
            gone.add(failure[0])
            yield failure
        moving = [index for index, one in enumerate(full) if one not in gone]
        if not moving:
            return
        leaving = leaving.of(moving)
        for index, emptied in zip(moving, window.move(leaving), strict=True):
            full[index].spare = np.concatenate([full[index].spare, emptied])
            self._sections.moved(full[index].slot)
        if self._selector is not None:
            self._selector.retire(leaving)

    def _grow(
        self, batch: Sequence[Running], slots: Ids, needs: Sequence[Need]
    ) -> Iterator[Failure]:
        """Give each row of some requests the pages for so many tokens.

        All requests at once, as that takes hardly longer than one of them; if the pool has not
        enough, one after another.
        """
        try:
            self._grow_all(batch, slots, needs)
        except TriptychError as error:
            if len(batch) == 1:
                yield batch[0], error
                return
            for at, one in enumerate(batch):
                only = slice(at, at + 1)
                alone = [(table, tokens[:, only]) for table, tokens in needs]
                yield from self._grow([one], slots[only], alone)

    def _grow_all(self, batch: Sequence[Running], slots: Ids, needs: Sequence[Need]) -> None:
        """Raises: PoolExhausted, and nothing has changed"""
        counts: Ids64 = np.zeros(len(batch), np.int64)
        for table, tokens in needs:
            table.count_lacking(slots, tokens, counts)
        lacking: list[int] = counts.tolist()
        if not any(lacking):
            return
        pages, first = self._take(batch, lacking), np.cumsum(counts) - counts
        for table, tokens in needs:
            table.append_pages(slots, tokens, pages, first)
        for slot in slots.tolist():
            self._sections.moved(slot)

    def _take(self, batch: Sequence[Running], counts: Sequence[int]) -> Ids:
        """Pages for each request: its own spare ones first, then of this worker's stock."""
        short = [max(0, count - one.spare.size) for one, count in zip(batch, counts, strict=True)]
        fresh = self._pool.take(sum(short)) if any(short) else NO_PAGES
        parts = list[Ids]()
        for one, count, more in zip(batch, counts, short, strict=True):
            parts.append(one.spare[:count])
            one.spare = one.spare[count:]
            if more:
                parts.append(fresh[:more])
                one.grown.append(fresh[:more])
                fresh = fresh[more:]
        return np.concatenate(parts)


def _slots(batch: Sequence[Running]) -> Ids:
    return np.array([one.slot for one in batch], np.int32)
