"""Pages for the next token of every running request, and old tokens moved out of raw pages."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from triptych.core.errors import TriptychError
from triptych.kvpool import WorkerPool
from triptych.workers.rows import Sections, SectionTable
from triptych.workers.running import Running
from triptych.workers.selection import Selector
from triptych.workers.window import Window

Ids = NDArray[np.int32]
Failure = tuple[Running, TriptychError]
"""Who got no pages, and why."""


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
        page_tokens = self._raw.layout.tokens
        for one in list(running.values()):
            if self._raw.length(one.slot) % page_tokens:
                continue
            if self._selector is not None:
                self._selector.fill(one.slot)
            try:
                self._grow(one, [(self._raw, self._raw.tokens[:, one.slot] + 1)])
            except TriptychError as error:
                yield one, error

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
        moving, seen = list[int](), [one.position for one in full]
        slots = np.array([one.slot for one in full], np.int32)
        leaving = window.leaving(self._sections, slots, seen, alpha_low)
        for index, one in enumerate(full):
            try:
                self._grow(one, list(zip(self._tables[1:], leaving.counts(index), strict=False)))
                moving.append(index)
            except TriptychError as error:
                yield one, error
        leaving = leaving.of(moving)
        for index, free in zip(moving, window.move(leaving), strict=True):
            full[index].spare = np.concatenate([full[index].spare, free])
            self._sections.moved(full[index].slot)
        if self._selector is not None:
            self._selector.retire(leaving)

    def _grow(self, one: Running, wanted: Sequence[tuple[SectionTable, Ids]]) -> None:
        """Give each row of a request the pages for so many tokens; raises PoolExhausted."""
        lacking = [table.lacking_pages(one.slot, tokens) for table, tokens in wanted]
        if not any(lacking):
            return
        pages = self._take(one, sum(lacking))
        for (table, tokens), count in zip(wanted, lacking, strict=True):
            table.append_pages(one.slot, tokens, pages[:count])
            pages = pages[count:]
        self._sections.moved(one.slot)

    def _take(self, one: Running, count: int) -> Ids:
        """Pages for one request: its own spare ones first, then this worker's stock."""
        reused = one.spare[:count]
        if reused.size < count:
            fresh = self._pool.take(count - reused.size)
            one.grown.append(fresh)
            reused = np.concatenate([reused, fresh])
        one.spare = one.spare[count:]
        return reused
