"""What a compressor has of a request, from plan to handover."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from triptych.core.handles import LeaseRef
from triptych.core.layout import PageLayout
from triptych.core.messages import Layers, LayersEncoded, Prefix, Send
from triptych.workers.kv.block_table import SectionTable
from triptych.workers.kv.handle_codec import Run, pages_of
from triptych.workers.kv.prefix_cache import SharedPrefix

Ids = NDArray[np.int32]


@dataclass(frozen=True)
class ClassPlan:
    """Which tokens of a request go into pages of one format."""

    layout: PageLayout
    tokens: Tensor
    """Positions in the sequence of T tokens, ascending, int32 on the device."""
    places: Tensor
    """Place of each among those of its row and class, int32 [head rows, T]; negative: it is in
    none of these pages."""
    counts: Ids
    """Tokens of each head row."""

    @property
    def pages(self) -> Ids:
        """Pages of each head row."""
        return pages_of(self.counts, self.layout)

    def table(self, ids: Ids) -> SectionTable:
        """Pages in row order, each head row as a layer of its own: with one slot and KV head."""
        rows, width = len(self.counts), self.pages.max(initial=0)
        tokens: Ids = np.zeros((rows, 1, 1), np.int32)
        table = SectionTable(self.layout, np.zeros((rows, 1, 1, width), np.int32), tokens)
        table.fill(0, self.counts, ids)
        return table


@dataclass(eq=False)
class Part:
    """All layers of a prompt, or some that follow upon each other, between plan and encoding."""

    lease_ref: LeaseRef
    raw: Ids
    """Raw pages, [head rows, pages of a row]."""
    leaving: slice
    """Raw pages of a head row whose tokens are encoded."""
    classes: list[ClassPlan] = field(default_factory=list[ClassPlan])
    """High, and low if the policy has it; none if the policy keeps 16 bits."""
    encoded: list[Ids] = field(default_factory=list[Ids])
    """New pages of each class, in row order; none before they were taken."""

    @property
    def kept(self) -> Ids:
        """Raw pages of sink and window, which stay as they are."""
        return np.delete(self.raw, self.leaving, axis=1)

    @property
    def new_pages(self) -> int:
        return sum(int(plan.pages.sum()) for plan in self.classes)

    @property
    def pages(self) -> Ids:
        """All that is left of it once it is encoded."""
        return np.concatenate([*self.encoded, self.kept.ravel()])


@dataclass(eq=False)
class Job:
    """One request between plan and encoding."""

    request: str
    tokens: int = 0
    """Tokens of the sequence; 0 before anything of it is here."""
    parts: list[Part] = field(default_factory=list[Part])
    """From the first layer on. All but the last are encoded as they come."""
    prefix: Prefix | None = None
    """What is to be kept for later requests."""
    shared: SharedPrefix | None = None
    """What is there already, and read where it is."""

    @property
    def rows(self) -> int:
        """Head rows that are here so far."""
        return sum(len(part.raw) for part in self.parts)

    @property
    def last(self) -> Part:
        """The only one that is not encoded yet, once all are here."""
        return self.parts[-1]

    @property
    def kept(self) -> Ids:
        return np.concatenate([part.kept.ravel() for part in self.parts])

    @property
    def new_pages(self) -> int:
        return sum(part.new_pages for part in self.parts)

    @property
    def total_pages(self) -> int:
        """Pages of all head rows after encoding that are its own."""
        return self.new_pages + self.kept.size

    @property
    def shared_pages(self) -> int:
        return self.shared.pages.size if self.shared else 0

    def runs(self, last: Sequence[Ids]) -> list[Run]:
        """What each class has, its new pages in row order; ``last``: those of the last part."""
        every = [*(part.encoded for part in self.parts[:-1]), last]
        return [
            (
                part.layout.format.name,
                np.concatenate([of.classes[index].counts for of in self.parts]),
                np.concatenate([encoded[index] for encoded in every]),
            )
            for index, part in enumerate(self.last.classes)
        ]


@dataclass(frozen=True)
class Early:
    """A part that is to be encoded while layers behind it are read."""

    job: Job
    part: Part
    message: Layers

    @property
    def answer(self) -> Send:
        """What whoever reads the prompt is to hear when it is done."""
        encoded = LayersEncoded(request=self.job.request, first=self.message.first)
        return Send(self.message.reader, encoded)


def split_by_class(ids: Ids, parts: Sequence[Part]) -> list[list[Ids]]:
    """The pages of every class of every part, each in row order, cut from one array."""
    counts = [[int(plan.pages.sum()) for plan in part.classes] for part in parts]
    ends = np.cumsum([0, *chain.from_iterable(counts)])
    cut = iter([ids[first:end] for first, end in pairwise(ends)])
    return [[next(cut) for _ in count] for count in counts]
