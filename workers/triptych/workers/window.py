# pyright: reportUnknownMemberType=false
# torch.from_numpy has no type hints.
"""Tokens that leave the window of a running request: planned and moved for all head rows at once.

A raw page leaves as a whole, once none of its tokens is in the window. Its tokens become high or
low or are dropped, and less significant ones step down for them (``plan_retirement``).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.core.pages import PagePlan
from triptych.kernels import plan_retirement, transcode
from triptych.kernels.compact.reference import HIGH, LOW
from triptych.workers.rows import SectionTable

Ids = NDArray[np.int32]
Cells = tuple[Ids, Ids]
"""Page and row of some tokens."""


@dataclass(frozen=True)
class Leaving:
    """What becomes of one raw page of each head row; arrays begin [layers, requests, kv_heads]."""

    slots: Ids
    """Slot of each request."""
    classes: NDArray[np.uint8]
    """Of each token of the page, [..., tokens]."""
    targets: Ids
    """Its place within that class."""
    victims: Ids
    """Places of high tokens that step down; negative: none."""
    victim_targets: Ids
    """Their places in low; negative: dropped."""
    counts: Ids
    """Tokens of high and low afterwards, [..., 2]."""

    def of(self, requests: Sequence[int]) -> "Leaving":
        """The part of some of the requests."""
        return Leaving(
            slots=self.slots[requests],
            classes=self.classes[:, requests],
            targets=self.targets[:, requests],
            victims=self.victims[:, requests],
            victim_targets=self.victim_targets[:, requests],
            counts=self.counts[:, requests],
        )


@dataclass(frozen=True, eq=False)
class Window:
    """The newest tokens of every slot, which lie in raw pages behind those of the sink."""

    arena: Tensor
    plan: PagePlan
    raw: SectionTable
    high: SectionTable
    low: SectionTable | None

    def is_full(self, slot: int) -> bool:
        """Whether a raw page is older than the window.

        All rows hold equally many raw tokens, so the first one speaks for all.
        """
        return self.plan.leaving_pages(int(self.raw.tokens[0, slot, 0])) > 0

    def leaving(self, slots: Sequence[int], seen: Sequence[int]) -> Leaving:
        """Plan what becomes of the page behind the sink; ``seen``: tokens of each request."""
        at = np.array(slots, np.int32)
        layers, all_slots, kv_heads, _ = self.raw.pages.shape
        pages = self.raw.pages[:, at, :, self.plan.sink_pages].reshape(-1, kv_heads)
        first: Ids = np.arange(layers, dtype=np.int32) * np.int32(all_slots)
        rows: Ids = (first[:, None] + at).ravel()
        policy = self.plan.policy
        told_apart = float(policy.score_every > 0)
        plan = plan_retirement(
            self.arena,
            self.raw.layout,
            torch.from_numpy(np.ascontiguousarray(pages)),
            self.high.every_layer,
            self.low.every_layer if self.low is not None else None,
            torch.from_numpy(rows),
            torch.tensor(seen, dtype=torch.int32).repeat(layers),
            alpha_high=policy.alpha_high * told_apart,
            alpha_low=policy.alpha_low * told_apart,
        )
        shape = (layers, len(slots), kv_heads, -1)
        return Leaving(
            slots=at,
            classes=plan.classes.numpy().reshape(shape),
            targets=plan.targets.numpy().reshape(shape),
            victims=plan.victims.numpy().reshape(shape),
            victim_targets=plan.victim_targets.numpy().reshape(shape),
            counts=plan.counts.numpy().reshape(shape),
        )

    def move(self, leaving: Leaving) -> Ids:
        """Move tokens as planned, into pages that the tables have by now.

        Who steps down goes first, since newcomers take those places.

        Returns: the raw pages that hold nothing any more, [requests, pages]
        """
        raw, high, low = self.raw, self.high, self.low
        if low is not None:
            fallen = np.nonzero(leaving.victim_targets >= 0)
            source = _cells(high, leaving, fallen, leaving.victims)
            self._transcode(high, low, source, _cells(low, leaving, fallen, leaving.victim_targets))
        for name, table in ((LOW, low), (HIGH, high)):
            if table is not None:
                chosen = np.nonzero(leaving.classes == name)
                source = self._raw_cells(leaving, chosen)
                self._transcode(raw, table, source, _cells(table, leaving, chosen, leaving.targets))
                table.tokens[:, leaving.slots] = leaving.counts[..., 0 if name == HIGH else 1]
        first = self.plan.sink_pages
        gone = [raw.drop_pages(slot, slice(first, first + 1)) for slot in leaving.slots.tolist()]
        return np.stack(gone)

    def _raw_cells(self, leaving: Leaving, chosen: tuple[NDArray[np.intp], ...]) -> Cells:
        layer, request, head, token = chosen
        page = self.raw.pages[layer, leaving.slots[request], head, self.plan.sink_pages]
        return page, token.astype(np.int32)

    def _transcode(
        self, source: SectionTable, target: SectionTable, read: Cells, write: Cells
    ) -> None:
        if read[0].size:
            cells = (torch.from_numpy(part) for part in (*read, *write))
            transcode(self.arena, source.layout, target.layout, *cells)


def _cells(
    table: SectionTable, leaving: Leaving, chosen: tuple[NDArray[np.intp], ...], places: Ids
) -> Cells:
    """Where some tokens lie, given their places in the lists of a table."""
    layer, request, head, _ = chosen
    column, row = np.divmod(places[chosen], np.int32(table.layout.tokens))
    return table.pages[layer, leaving.slots[request], head, column], row
