"""Tokens that leave the window of a running request: planned and moved for all head rows at once.

A raw page leaves as a whole, once none of its tokens is in the 16-bit window. Its tokens become
high, and less significant ones step down for them (``plan_retirement``).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from triptych.kernels import Retirement, books, plan_retirement, transcode
from triptych.workers.journal import Journal
from triptych.workers.memory import NO_PAGES, PageMemory
from triptych.workers.rows import Sections, SectionTable

Ids = NDArray[np.int32]


@dataclass(frozen=True)
class Leaving:
    """What becomes of one raw page of each head row of some slots."""

    slots: Ids
    plan: Retirement[Ids]
    """Arrays begin [layers, requests, kv_heads]."""

    def of(self, requests: Sequence[int]) -> "Leaving":
        """The part of some of the requests."""
        if len(requests) == len(self.slots):
            return self
        return Leaving(self.slots[requests], Retirement(self.plan.numbers[:, requests]))


PLANNED, LOWERED, ENTERED = 1, 2, 3
"""Phases of a retirement."""


class Window:
    """The newest tokens of every slot, which lie in raw pages behind those of the sink."""

    def __init__(self, memory: PageMemory, journal: Journal) -> None:
        self.memory, self.plan, self.moving = memory, journal.plan, journal.retirements
        self.raw, self.high, *low = journal.tables
        self.low = low[0] if low else None
        self._before = replace(self.raw, pages=self.moving.raw_pages)
        self._full_tokens = self.plan.full_raw_tokens
        page = np.arange(self.raw.layout.tokens, dtype=np.int32) + np.int32(self.plan.sink_tokens)
        self._page_places: Ids = np.broadcast_to(page, (*self.raw.tokens.shape, page.size))
        """Of each head row, the places in raw of the tokens behind those of the sink."""

    def is_full(self, slot: int) -> bool:
        """Whether a raw page of a slot is older than the window."""
        return self.raw.length(slot) >= self._full_tokens

    def leaving(
        self,
        sections: Sections,
        slots: Ids,
        seen: Sequence[int],
        least_alpha_low: float = 0.0,
    ) -> Leaving:
        """Plan what becomes of the page behind the sink; ``seen``: tokens of each request.

        ``sections``: the tables as kernels see them.
        ``least_alpha_low``: what the policy's ``alpha_low`` is raised to, if it is lower.

        Its tokens become high. As many older ones leave the window of tokens that are high in any
        case, and are judged: their positions are a fixed distance behind those of the page.
        """
        layers, _, kv_heads, _ = self.raw.pages.shape
        alpha_high, alpha_low = self.plan.policy.answer_alphas
        alpha_low = min(max(alpha_low, least_alpha_low), alpha_high)
        sections.renew(slots)
        put = self.memory.device.put
        plan = plan_retirement(
            self.memory.near,
            sections.every_layer[1],
            sections.every_layer[2] if self.low is not None else None,
            *map(put, self._rows(slots, seen)),
            count=self.raw.layout.tokens,
            alpha_high=alpha_high,
            alpha_low=alpha_low,
        )
        numbers = plan.numbers.cpu().numpy()
        return Leaving(slots, Retirement(numbers.reshape(layers, len(slots), kv_heads, -1)))

    def _rows(self, slots: Ids, seen: Sequence[int]) -> Ids:
        """Rows of all layers, tokens seen, and the oldest position that leaves the high window.

        Only what is in high already can be judged, so it is one page behind at least.
        """
        policy, raw = self.plan.policy, self.raw
        lag = max(raw.layout.tokens, policy.high_window_tokens - policy.window_tokens)
        now = np.array(seen, np.int32)
        return books.leaving_rows(raw.tokens, slots, now, self.plan.sink_tokens, lag)

    def move(self, leaving: Leaving) -> Ids:
        """Move tokens as planned, into pages that the tables have by now.

        The plan is written down first, and after each part how far it has come: each part
        reads what it does not write, so whoever takes over can do it again.

        Returns: the raw pages that hold nothing any more, [requests, head rows]
        """
        moving, slots = self.moving, leaving.slots
        numbers = leaving.plan.numbers
        books.write_down(self.raw.pages, numbers, slots, moving.raw_pages, moving.plan)
        moving.retired_then[slots] = moving.retired[slots] + self.raw.layout.tokens
        moving.phase[slots] = PLANNED
        return self._carry_out(leaving, PLANNED)

    def finish(self, slot: int) -> Ids:
        """Carry out what a worker had begun for a slot when it died, if it had.

        Returns: the raw pages that hold nothing any more
        """
        moving, at = self.moving, np.array([slot], np.int32)
        phase = int(moving.phase[slot])
        if phase == 0:
            return NO_PAGES
        leaving = Leaving(at, Retirement(moving.plan[:, at]))
        return self._carry_out(leaving, phase)[0]

    def _carry_out(self, leaving: Leaving, phase: int) -> Ids:
        """Who steps down goes first, since newcomers take those places."""
        moving, slots = self.moving, leaving.slots
        if phase <= PLANNED:
            self._lower(leaving)
            moving.phase[slots] = LOWERED
        if phase <= LOWERED:
            self._enter(leaving)
            moving.phase[slots] = ENTERED
        return self._close(leaving)

    def _lower(self, leaving: Leaving) -> None:
        if self.low is not None:
            plan = leaving.plan
            cells = self._cells(self.high, plan.movers, self.low, plan.mover_places, leaving.slots)
            self._transcode(self.high, self.low, cells)

    def _enter(self, leaving: Leaving) -> None:
        slots, places = leaving.slots, leaving.plan.places
        source = self._page_places[:, : len(slots)]
        cells = self._cells(self._before, source, self.high, places, slots)
        self._transcode(self.raw, self.high, cells)

    def _cells(
        self,
        source: SectionTable,
        places: Ids,
        target: SectionTable,
        target_places: Ids,
        slots: Ids,
    ) -> Ids:
        """Where tokens lie, and where they go: page and row each, [4, tokens that move]."""
        room, target_room = source.layout.tokens, target.layout.tokens
        return books.moving_cells(
            source.pages, room, places, target.pages, target_room, target_places, slots
        )

    def _close(self, leaving: Leaving) -> Ids:
        """Set tables and counts as they are from now on.

        Returns: the raw pages that hold nothing any more, [requests, head rows]
        """
        moving, slots, raw = self.moving, leaving.slots, self.raw
        self.high.tokens[:, slots] = leaving.plan.counts[..., 0]
        if self.low is not None:
            self.low.tokens[:, slots] = leaving.plan.counts[..., 1]
        first, room = self.plan.sink_pages, raw.layout.tokens
        emptied = books.drop_page(raw.pages, raw.tokens, moving.raw_pages, slots, first, room)
        moving.retired[slots] = moving.retired_then[slots]
        moving.phase[slots] = 0
        return emptied

    def _transcode(self, source: SectionTable, target: SectionTable, cells: Ids) -> None:
        if cells.size:
            put = map(self.memory.device.put, cells)
            transcode(self.memory.near, source.layout, target.layout, *put)
            self.memory.save(cells[2])
