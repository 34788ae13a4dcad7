"""State of a request in the compressor, from plan to handover."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise, takewhile

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from triptych.core.handles import LeaseRef
from triptych.core.images import Modality, Segment
from triptych.core.layout import PageLayout
from triptych.core.messages import Floor, Layers, LayersEncoded, Send
from triptych.core.methods.learned_files import LearnedFile
from triptych.core.pages import PagePlan
from triptych.core.policy import KeyMerging
from triptych.workers.kv.block_table import SectionTable
from triptych.workers.kv.handle_codec import Run, pages_of, pool_pages, small_pages
from triptych.workers.kv.prefix_cache import SharedPrefix

Ids = NDArray[np.int32]


@dataclass(frozen=True)
class ClassPlan:
    """Tokens of a request that go into pages of one format."""

    layout: PageLayout
    tokens: Tensor
    """Positions in the sequence of T tokens, ascending, int32 on the device. Of a prompt that was
    read in blocks: places in the raw pages, [T] or [head rows, T]."""
    places: Tensor
    """Index of each token within its row and class, int32 [head rows, T]; negative: not in the
    class."""
    counts: Ids
    """Tokens of each head row."""
    is_fixed: bool = False
    """Whether its pages are never written again: whole blocks of a prompt."""
    merged: tuple["MergedChunks | MergedSets", ...] = ()
    """Tokens that are merged, those of a modality each. ``tokens`` are the others, which are stored
    as they are."""

    @property
    def pages(self) -> Ids:
        """Pages of each head row, small ones if the layout has such."""
        return pages_of(self.counts, self.layout)

    @property
    def new_pages(self) -> int:
        """Pages of the pool for all head rows."""
        return self.layout.pool_pages(int(self.pages.sum()))

    def table(self, ids: Ids) -> SectionTable:
        """Block table with each head row as a layer of one slot and one KV head."""
        rows, width = len(self.counts), self.pages.max(initial=0)
        tokens: Ids = np.zeros((rows, 1, 1), np.int32)
        table = SectionTable(self.layout, np.zeros((rows, 1, 1, width), np.int32), tokens)
        table.fill(0, self.counts, ids)
        return table


@dataclass(frozen=True)
class MergedChunks:
    """Chunks of consecutive tokens of one modality, each of which becomes one token."""

    modality: Modality
    network: LearnedFile
    starts: Tensor
    """First position of each chunk, ascending: int64 [chunks]."""
    first_place: int
    """Index of the first merged token in each row of the class; the others follow."""

    @property
    def made(self) -> int:
        """Merged tokens of each head row."""
        return len(self.starts)

    @property
    def members(self) -> int:
        """Tokens of which these are made."""
        return len(self.starts) * self.network.chunk_tokens


@dataclass(frozen=True)
class MergedSets:
    """Tokens of one modality that become fewer: sets of alike neighbours, other ones in each head
    row, but as many."""

    modality: Modality
    rule: KeyMerging
    positions: Tensor
    """Of all tokens of the sets, ascending: int64 [n]."""
    sets: int
    """Merged tokens of each head row. A set may have one token, which is stored as it is."""
    first_place: int
    """Index of the first merged token in each row of the class; the others follow."""

    @property
    def made(self) -> int:
        """Merged tokens of each head row."""
        return self.sets

    @property
    def members(self) -> int:
        """Tokens of which these are made."""
        return len(self.positions)


@dataclass(eq=False)
class LayerGroup:
    """Consecutive layers of a prompt, or all of them, from plan to encoding."""

    lease_ref: LeaseRef
    raw: Ids
    """Raw pages, [head rows, pages of a row]."""
    leaving: range
    """Positions of the tokens that move to high and low pages."""
    stored: Ids | None = None
    """Tokens of each head row, if prefill has dropped some: their places in the raw pages are not
    their positions. None: all tokens are there."""
    classes: list[ClassPlan] = field(default_factory=list[ClassPlan])
    """Recent, high, low if the policy has it, and fixed if the request has fixed pages of its own;
    empty if the policy keeps 16 bits."""
    encoded: list[Ids] = field(default_factory=list[Ids])
    """New pages of each class, in row order; empty before they are allocated."""

    @property
    def new_pages(self) -> int:
        """Pages of the pool that encoding takes."""
        return sum(plan.new_pages for plan in self.classes)

    @property
    def pages(self) -> Ids:
        """All pages of the pool after encoding."""
        return np.concatenate(
            [
                pool_pages(ids, plan.layout.parts)
                for plan, ids in zip(self.classes, self.encoded, strict=True)
            ]
        )


@dataclass(eq=False)
class Job:
    """One request between plan and encoding."""

    request: str
    plan: PagePlan
    """That of its compression method; of the default one before its first layers arrive."""
    tokens: int = 0
    """Tokens of the sequence; 0 before its first layers arrive."""
    floor: Floor = "low"
    segments: tuple[Segment, ...] = ()
    """Segments of the prompt that are no text."""
    groups: list[LayerGroup] = field(default_factory=list[LayerGroup])
    """From the first layer on. All but the last are encoded when they arrive."""
    arena: str = ""
    """Where its decode worker is, once the router has said so."""
    shared: SharedPrefix | None = None
    """Pages of a cached prefix that the request shares."""

    @property
    def is_image(self) -> NDArray[np.bool_]:
        """Which tokens of the sequence are of images."""
        found = np.zeros(self.tokens, np.bool_)
        for segment in self.segments:
            found[segment.start : segment.end] = True
        return found

    @property
    def rows(self) -> int:
        """Head rows that have arrived."""
        return sum(len(group.raw) for group in self.groups)

    def rows_before(self, group: LayerGroup) -> int:
        """Head rows of the layers in front of a group."""
        return sum(len(one.raw) for one in takewhile(lambda one: one is not group, self.groups))

    @property
    def last(self) -> LayerGroup:
        """The group that is not encoded yet, once all layers have arrived."""
        return self.groups[-1]

    @property
    def moves_raw(self) -> bool:
        """Whether its raw pages stay, and its decode worker is in another arena."""
        return not self.plan.compresses and self.last.lease_ref.arena != self.arena

    @property
    def new_pages(self) -> int:
        return sum(group.new_pages for group in self.groups)

    @property
    def total_pages(self) -> int:
        """The request's own pages of the pool after encoding; raw ones of a 16-bit policy."""
        return sum(group.new_pages if group.classes else group.raw.size for group in self.groups)

    @property
    def shared_pages(self) -> int:
        return self.shared.pages.size if self.shared else 0

    def runs(self, last: Sequence[Ids]) -> list[Run]:
        """Pages of each class in row order; ``last``: new pages of the last group.

        Raw pages of a 16-bit policy are not among them.
        """
        every = [*(group.encoded for group in self.groups[:-1]), last]
        return [
            (
                plan.layout,
                np.concatenate([of.classes[index].counts for of in self.groups]),
                np.concatenate([encoded[index] for encoded in every]),
            )
            for index, plan in enumerate(self.last.classes)
            if not plan.is_fixed
        ]

    def fixed_run(self, last: Sequence[Ids]) -> Run | None:
        """Fixed pages, shared or its own; None if there are none."""
        if self.shared is not None:
            return self.plan.high, self.shared.counts, self.shared.pages
        for plan, ids in zip(self.last.classes, last, strict=True):
            if plan.is_fixed:
                return plan.layout, plan.counts, ids
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
    """Split one array of pages of the pool by group and class, each in row order.

    A class of small pages gets as many of them as it needs.
    """
    plans = [group.classes for group in groups]
    ends = np.cumsum([0, *(plan.new_pages for plan in chain.from_iterable(plans))])
    cut = iter([ids[first:end] for first, end in pairwise(ends)])
    return [
        [small_pages(next(cut), plan.layout.parts)[: int(plan.pages.sum())] for plan in classes]
        for classes in plans
    ]
