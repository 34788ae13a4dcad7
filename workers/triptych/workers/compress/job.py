"""State of a request in the compressor, from plan to handover."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from triptych.core.handles import LeaseRef
from triptych.core.layout import PageLayout
from triptych.core.messages import Layers, LayersEncoded, Send
from triptych.workers.kv.block_table import SectionTable
from triptych.workers.kv.handle_codec import Run, pages_of
from triptych.workers.kv.prefix_cache import SharedPrefix

Ids = NDArray[np.int32]


@dataclass(frozen=True)
class ClassPlan:
    """Tokens of a request that go into pages of one format."""

    layout: PageLayout
    tokens: Tensor
    """Positions in the sequence of T tokens, ascending, int32 on the device."""
    places: Tensor
    """Index of each token within its row and class, int32 [head rows, T]; negative: not in the
    class."""
    counts: Ids
    """Tokens of each head row."""
    is_fixed: bool = False
    """Whether its pages are never written again: whole blocks of a prompt."""

    @property
    def pages(self) -> Ids:
        """Pages of each head row."""
        return pages_of(self.counts, self.layout)

    def table(self, ids: Ids) -> SectionTable:
        """Block table with each head row as a layer of one slot and one KV head."""
        rows, width = len(self.counts), self.pages.max(initial=0)
        tokens: Ids = np.zeros((rows, 1, 1), np.int32)
        table = SectionTable(self.layout, np.zeros((rows, 1, 1, width), np.int32), tokens)
        table.fill(0, self.counts, ids)
        return table


@dataclass(eq=False)
class LayerGroup:
    """Consecutive layers of a prompt, or all of them, from plan to encoding."""

    lease_ref: LeaseRef
    raw: Ids
    """Raw pages, [head rows, pages of a row]."""
    leaving: slice
    """Raw pages of a head row whose tokens are encoded."""
    classes: list[ClassPlan] = field(default_factory=list[ClassPlan])
    """High, low if the policy has it, and fixed if the request has fixed pages of its own; empty if
    the policy keeps 16 bits."""
    encoded: list[Ids] = field(default_factory=list[Ids])
    """New pages of each class, in row order; empty before they are allocated."""

    @property
    def kept(self) -> Ids:
        """Raw pages of sink and window, which are not encoded."""
        return np.delete(self.raw, self.leaving, axis=1)

    @property
    def new_pages(self) -> int:
        return sum(int(plan.pages.sum()) for plan in self.classes)

    @property
    def pages(self) -> Ids:
        """All pages after encoding."""
        return np.concatenate([*self.encoded, self.kept.ravel()])


@dataclass(eq=False)
class Job:
    """One request between plan and encoding."""

    request: str
    tokens: int = 0
    """Tokens of the sequence; 0 before its first layers arrive."""
    groups: list[LayerGroup] = field(default_factory=list[LayerGroup])
    """From the first layer on. All but the last are encoded when they arrive."""
    shared: SharedPrefix | None = None
    """Pages of a cached prefix that the request shares."""

    @property
    def rows(self) -> int:
        """Head rows that have arrived."""
        return sum(len(group.raw) for group in self.groups)

    @property
    def last(self) -> LayerGroup:
        """The group that is not encoded yet, once all layers have arrived."""
        return self.groups[-1]

    @property
    def kept(self) -> Ids:
        return np.concatenate([group.kept.ravel() for group in self.groups])

    @property
    def new_pages(self) -> int:
        return sum(group.new_pages for group in self.groups)

    @property
    def total_pages(self) -> int:
        """The request's own pages of all head rows after encoding."""
        return self.new_pages + self.kept.size

    @property
    def shared_pages(self) -> int:
        return self.shared.pages.size if self.shared else 0

    def runs(self, last: Sequence[Ids]) -> list[Run]:
        """Pages of each class in row order; ``last``: new pages of the last group."""
        every = [*(group.encoded for group in self.groups[:-1]), last]
        return [
            (
                plan.layout.format.name,
                np.concatenate([of.classes[index].counts for of in self.groups]),
                np.concatenate([encoded[index] for encoded in every]),
            )
            for index, plan in enumerate(self.last.classes)
            if not plan.is_fixed
        ]

    def fixed_run(self, last: Sequence[Ids]) -> Run | None:
        """Fixed pages, shared or its own; None if there are none."""
        if self.shared is not None:
            name = self.last.classes[0].layout.format.name
            return name, self.shared.counts, self.shared.pages.ravel()
        for plan, ids in zip(self.last.classes, last, strict=True):
            if plan.is_fixed:
                return plan.layout.format.name, plan.counts, ids
        return None


@dataclass(frozen=True)
class EarlyEncode:
    """A group to encode while later layers are prefilled."""

    job: Job
    group: LayerGroup
    message: Layers

    @property
    def reply(self) -> Send:
        """Message for the prefill worker when the group is encoded."""
        encoded = LayersEncoded(request=self.job.request, first=self.message.first)
        return Send(self.message.reader, encoded)


def split_by_class(ids: Ids, groups: Sequence[LayerGroup]) -> list[list[Ids]]:
    """Split one array of pages by group and class, each in row order."""
    counts = [[int(plan.pages.sum()) for plan in group.classes] for group in groups]
    ends = np.cumsum([0, *chain.from_iterable(counts)])
    cut = iter([ids[first:end] for first, end in pairwise(ends)])
    return [[next(cut) for _ in count] for count in counts]
