"""Tokens that leave the window of a running request: planned and moved for all head rows at once.

A raw page leaves as a whole, once none of its tokens is in the 16-bit window. Its tokens become
high, and less significant ones step down for them (``plan_retirement``).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from triptych.kernels import plan_retirement, transcode
from triptych.workers.journal import Journal
from triptych.workers.memory import PageMemory
from triptych.workers.rows import Sections, SectionTable

Ids = NDArray[np.int32]
Cells = tuple[Ids, Ids]
"""Page and row of some tokens."""


@dataclass(frozen=True)
class Leaving:
    """What becomes of one raw page of each head row; arrays begin [layers, requests, kv_heads]."""

    slots: Ids
    """Slot of each request."""
    places: Ids
    """Places in high of the tokens of the page, [..., tokens]."""
    movers: Ids
    """Places of high tokens that step down for them; negative: none."""
    mover_places: Ids
    """Their places in low; negative: dropped."""
    counts: Ids
    """Tokens of high and low afterwards, [..., 2]."""

    def of(self, requests: Sequence[int]) -> "Leaving":
        """The part of some of the requests."""
        return Leaving(
            slots=self.slots[requests],
            places=self.places[:, requests],
            movers=self.movers[:, requests],
            mover_places=self.mover_places[:, requests],
            counts=self.counts[:, requests],
        )


PLANNED, LOWERED, ENTERED = 1, 2, 3
"""Phases of a retirement."""


class Window:
    """The newest tokens of every slot, which lie in raw pages behind those of the sink."""

    def __init__(self, memory: PageMemory, journal: Journal) -> None:
        self.memory, self.plan, self.moving = memory, journal.plan, journal.retirements
        self.raw, self.high, *low = journal.tables
        self.low = low[0] if low else None
        layers, all_slots = self.raw.pages.shape[:2]
        self._full_tokens = self.plan.full_raw_tokens
        self._first_rows: Ids = np.arange(layers, dtype=np.int32)[:, None] * np.int32(all_slots)

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
        rows: Ids = (self._first_rows + slots).ravel()
        now: Ids = np.array(seen, np.int32)
        alpha_high, alpha_low = self.plan.policy.answer_alphas
        alpha_low = min(max(alpha_low, least_alpha_low), alpha_high)
        sections.renew(slots)
        put = self.memory.device.put
        plan = plan_retirement(
            self.memory.near,
            sections.every_layer[1],
            sections.every_layer[2] if self.low is not None else None,
            put(rows),
            put(self._of_every_layer(now)),
            put(self._of_every_layer(self._first_judged(slots, now))),
            count=self.raw.layout.tokens,
            alpha_high=alpha_high,
            alpha_low=alpha_low,
        )
        shape = (layers, len(slots), kv_heads, -1)
        return Leaving(
            slots=slots,
            places=plan.places.cpu().numpy().reshape(shape),
            movers=plan.movers.cpu().numpy().reshape(shape),
            mover_places=plan.mover_places.cpu().numpy().reshape(shape),
            counts=plan.counts.cpu().numpy().reshape(shape),
        )

    def _of_every_layer(self, numbers: Ids) -> Ids:
        """Numbers of requests, once for each layer."""
        return np.concatenate([numbers] * len(self.raw.pages))

    def _first_judged(self, slots: Ids, seen: Ids) -> Ids:
        """The oldest position that leaves the high window with this page.

        Only what is in high already can be judged, so it is one page behind at least.
        """
        behind_sink = self.raw.tokens[0, slots, 0] - self.plan.sink_tokens
        policy = self.plan.policy
        lag = max(self.raw.layout.tokens, policy.high_window_tokens - policy.window_tokens)
        return seen - behind_sink - np.int32(lag)

    def move(self, leaving: Leaving) -> list[Ids]:
        """Move tokens as planned, into pages that the tables have by now.

        The plan is written down first, and after each part how far it has come: each part
        reads what it does not write, so whoever takes over can do it again.

        Returns: of each request, the raw pages that hold nothing any more
        """
        moving, slots = self.moving, leaving.slots
        moving.raw_pages[:, slots] = self.raw.pages[:, slots]
        moving.places[:, slots], moving.movers[:, slots] = leaving.places, leaving.movers
        moving.mover_places[:, slots] = leaving.mover_places
        moving.counts[:, slots] = leaving.counts
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
            return np.empty(0, np.int32)
        leaving = Leaving(
            slots=at,
            places=moving.places[:, at],
            movers=moving.movers[:, at],
            mover_places=moving.mover_places[:, at],
            counts=moving.counts[:, at],
        )
        return self._carry_out(leaving, phase)[0]

    def _carry_out(self, leaving: Leaving, phase: int) -> list[Ids]:
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
            falling = np.nonzero(leaving.mover_places >= 0)
            source = _cells(self.high, leaving, falling, leaving.movers)
            target = _cells(self.low, leaving, falling, leaving.mover_places)
            self._transcode(self.high, self.low, source, target)

    def _enter(self, leaving: Leaving) -> None:
        every = np.nonzero(leaving.places >= 0)
        layer, request, head, token = every
        first = self.plan.sink_pages
        pages = self.moving.raw_pages[layer, leaving.slots[request], head, first]
        target = _cells(self.high, leaving, every, leaving.places)
        self._transcode(self.raw, self.high, (pages, token.astype(np.int32)), target)

    def _close(self, leaving: Leaving) -> list[Ids]:
        """Set tables and counts as they are from now on."""
        moving, slots, first = self.moving, leaving.slots, self.plan.sink_pages
        self.high.tokens[:, slots] = leaving.counts[..., 0]
        if self.low is not None:
            self.low.tokens[:, slots] = leaving.counts[..., 1]
        before = moving.raw_pages[:, slots]
        self.raw.pages[:, slots, :, first:-1] = before[..., first + 1 :]
        self.raw.tokens[:, slots] -= self.raw.layout.tokens
        moving.retired[slots] = moving.retired_then[slots]
        moving.phase[slots] = 0
        return [before[:, request, :, first].ravel() for request in range(len(slots))]

    def _transcode(
        self, source: SectionTable, target: SectionTable, read: Cells, write: Cells
    ) -> None:
        if read[0].size:
            cells = map(self.memory.device.put, (*read, *write))
            transcode(self.memory.near, source.layout, target.layout, *cells)
            self.memory.save(write[0])


def _cells(
    table: SectionTable, leaving: Leaving, chosen: tuple[NDArray[np.intp], ...], places: Ids
) -> Cells:
    """Where some tokens lie, given their places in the lists of a table."""
    layer, request, head, _ = chosen
    column, row = np.divmod(places[chosen], np.int32(table.layout.tokens))
    return table.pages[layer, leaving.slots[request], head, column], row
