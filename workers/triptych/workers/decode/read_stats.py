# numpy's comparisons lack types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Statistics of the pages and bytes that a decode step reads."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from triptych.core.layout import PageLayout
from triptych.workers.kv.block_table import SectionTable

Ids = NDArray[np.int32]
Keys = NDArray[np.int64]

SMALL = 1 << 31
"""Mark of the ids of small pages, which are numbered apart from other pages."""


@dataclass(frozen=True, eq=False)
class Part:
    """One table's rows of the requests of a step."""

    layout: PageLayout
    pages: Ids
    """[layers, requests, kv_heads, pages of a row]."""
    tokens: Ids
    """[layers, requests, kv_heads]."""

    @classmethod
    def of(cls, table: SectionTable, slots: Ids) -> "Part":
        """A copy of what the table has for some slots, as wide as the longest row."""
        tokens = table.tokens[:, slots]
        width = int(table.layout.pages(int(tokens.max(initial=0))))
        return cls(table.layout, table.pages[:, slots, :, :width], tokens)

    @property
    def held(self) -> Ids:
        """Tokens of each page, [layers, requests, kv_heads, pages of a row]."""
        room = np.int32(self.layout.tokens)
        first = np.arange(self.pages.shape[-1], dtype=np.int32) * room
        return np.clip(self.tokens[..., None] - first, 0, room)


@dataclass(frozen=True, eq=False)
class Lists:
    """The selected pages, as indices into the concatenated parts."""

    ordinals: Ids
    """[layers, requests, kv_heads, most pages]."""
    counts: Ids
    """[layers, requests, kv_heads]."""
    is_read: NDArray[np.bool_]
    """Whether a request read its list in a layer instead of all pages, [layers, requests]."""


@dataclass(frozen=True, eq=False)
class Reading:
    """The rows of the requests of one step after it, and the pages read of them."""

    names: tuple[str, ...]
    """Requests."""
    parts: tuple[Part, ...]
    lists: Lists | None = None
    """None: every page was read."""

    @property
    def pages(self) -> int:
        """Pages of all rows."""
        return sum(int((part.held > 0).sum()) for part in self.parts)

    def read(self) -> list[NDArray[np.bool_]]:
        """Mask of the pages read, for each part [layers, requests, kv_heads, pages of a row]."""
        every = [part.held > 0 for part in self.parts]
        if self.lists is None:
            return every
        first = np.zeros(self.parts[0].tokens.shape, np.int32)
        chosen = list[NDArray[np.bool_]]()
        for held in every:
            listed = _listed(self.lists, first, held.shape[-1])
            chosen.append(held & (listed | ~self.lists.is_read[..., None, None]))
            first = first + held.sum(axis=-1, dtype=np.int32)
        return chosen

    def layer_bytes(self) -> NDArray[np.int64]:
        """Bytes of keys and values that attention read, [layers]."""
        total = np.zeros(self.parts[0].tokens.shape[0], np.int64)
        for part, read in zip(self.parts, self.read(), strict=True):
            tokens = np.where(read, part.held, 0).sum(axis=(1, 2, 3), dtype=np.int64)
            total += np.rint(tokens * part.layout.read_bytes).astype(np.int64)
        return total

    def keys(self) -> dict[str, Keys]:
        """Pages read by each request: (layer, KV head, page) packed in one number."""
        found = dict[str, list[Keys]]()
        for part, read in zip(self.parts, self.read(), strict=True):
            heads = part.tokens.shape[2]
            for index, name in enumerate(self.names):
                layer, head, column = np.nonzero(read[:, index])
                row = (layer * heads + head).astype(np.int64) << 32
                page = part.pages[layer, index, head, column].astype(np.int64)
                page |= SMALL * (part.layout.parts > 1)
                found.setdefault(name, []).append(row | page)
        return {name: np.concatenate(each) for name, each in found.items()}


def _listed(lists: Lists, first: Ids, width: int) -> NDArray[np.bool_]:
    """Mask of the columns of a part, which begins at ``first``, that the lists name."""
    most = lists.ordinals.shape[-1]
    column = lists.ordinals - first[..., None]
    is_listed = np.arange(most, dtype=np.int32) < lists.counts[..., None]
    inside = is_listed & (column >= 0) & (column < width)
    marks = np.zeros((*first.shape, width + 1), np.bool_)
    np.put_along_axis(marks, np.where(inside, column, width).astype(np.int64), True, axis=-1)
    return marks[..., :width]


def reused(before: Reading, now: Reading) -> tuple[int, int]:
    """Pages of a step that were read at the step before as well, and all pages of the step.

    This is TinyServe's cross-step reuse as we define it. Requests that were not in the step before
    do not count.

    Source: TinyServe (cross-step reuse; the paper does not define it)
    """
    earlier, later = before.keys(), now.keys()
    again = total = 0
    for name in earlier.keys() & later.keys():
        again += int(np.isin(later[name], earlier[name], assume_unique=True).sum())
        total += later[name].size
    return again, total


def reading_of(
    tables: Sequence[SectionTable], names: Sequence[str], slots: Ids, lists: Lists | None
) -> Reading:
    """A reading of some slots, with copies of their table rows."""
    return Reading(tuple(names), tuple(Part.of(table, slots) for table in tables), lists)
