# numpy's comparisons lack types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Page tables of the decode stage: the pages of each head row.

A head row is one (slot, layer, KV head); a slot is one request. One array holds the tables of all
layers, so that a step allocates the pages of every head row at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from triptych.core.layout import PageLayout
from triptych.kernels import Section, block_table_ops
from triptych.workers.device import Device

Ids = NDArray[np.int32]
Ids64 = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(eq=False)
class SectionTable:
    """Page table of one format: a dense, growing list of page ids per head row."""

    layout: PageLayout
    pages: Ids
    """Page ids, oldest first, [layers, slots, kv_heads, pages of a row]."""
    tokens: Ids
    """Tokens stored, [layers, slots, kv_heads]."""
    backward: bool = False
    """Whether ``pages`` is a reversed view: the first page is in the last entry."""

    @property
    def entries(self) -> Ids:
        """Page ids in memory order."""
        return self.pages[..., ::-1] if self.backward else self.pages

    @property
    def width(self) -> int:
        """The most pages that a row can have."""
        return self.pages.shape[3]

    @property
    def room(self) -> int:
        """The most tokens that a row can have."""
        return self.width * self.layout.tokens

    def fill(self, slot: int, tokens: Ids, ids: Ids) -> None:
        """Set a slot's rows from a handle: tokens [head rows], page ids in row order."""
        block_table_ops.fill_rows(self.pages, self.tokens, slot, tokens, self.layout.tokens, ids)

    def read(self, slot: int) -> tuple[Ids, Ids]:
        """Rows of a slot as ``fill`` takes them: tokens [head rows], and page ids in row order."""
        tokens = self.tokens[:, slot]
        counts = -(-tokens // np.int32(self.layout.tokens))
        used: Mask = np.arange(self.width) < counts[..., None]
        return tokens.ravel(), self.pages[:, slot][used]

    def run(self, slot: int) -> tuple[PageLayout, Ids, Ids]:
        """Layout, tokens and page ids of a slot."""
        return (self.layout, *self.read(slot))

    def clear(self, slot: int) -> None:
        self.tokens[:, slot] = 0

    def pages_at(self, slots: Ids, places: Ids) -> Ids:
        """Pages of the tokens at some places, [layers, slots, kv_heads, T].

        Negative places are skipped. In no order, with duplicates.
        """
        layer, at, head, _ = named = np.nonzero(places >= 0)
        return self.pages[layer, slots[at], head, places[named] // np.int32(self.layout.tokens)]

    def length(self, slot: int) -> int:
        """Tokens of each row of a slot; for tables of equally long rows."""
        return self.tokens.item(0, slot, 0)


@dataclass(eq=False)
class PageTable:
    """Bidirectional page table: page ids of one format or two in the same row of entries.

    The first format fills a row from the left, the second from the right. The two do not overlap
    if a row has one entry more than its tokens need in the format with fewer tokens per page:
    ceil(a/t) + ceil(b/u) <= ceil((a + b)/t) + 1 for u >= t.

    Source: LeanKV and DiffKV (bidirectional page table; their tables lack that entry)
    """

    layouts: Sequence[PageLayout]
    """Of one format or two."""
    entries: Ids
    """[layers, slots, kv_heads, entries of a row]."""
    tokens: Ids
    """[tables, layers, slots, kv_heads]."""

    def __post_init__(self) -> None:
        self._rooms = np.array([layout.tokens for layout in self.layouts], np.int32)

    @property
    def tables(self) -> list[SectionTable]:
        """One view for each format, the one from the left first."""
        sides = (self.entries, False), (self.entries[..., ::-1], True)
        return [
            SectionTable(layout, pages, tokens, backward)
            for layout, tokens, (pages, backward) in zip(
                self.layouts, self.tokens, sides, strict=False
            )
        ]

    def of_slot(self, slot: int) -> tuple[Ids, Ids]:
        """Copies of a slot's entries, [layers, kv_heads, entries of a row], and token counts,
        [tables, layers, kv_heads]."""
        return self.entries[:, slot].copy(), self.tokens[:, :, slot].copy()

    def tokens_plus_one(self, slots: Ids) -> Ids:
        """Token count of each row of some slots plus one: [layers, slots, kv_heads, tables]."""
        return block_table_ops.tokens_plus_one(self.tokens, slots)

    def count_lacking(self, slots: Ids, wanted: Ids) -> Ids64:
        """Number of pages that the rows of each slot lack to hold ``wanted`` tokens.

        ``wanted``: [layers, slots, kv_heads, tables].
        """
        return block_table_ops.count_lacking(self.tokens, slots, wanted, self._rooms)

    def append_pages(self, slots: Ids, wanted: Ids, ids: Ids, first: Ids64) -> None:
        """Append the lacking pages to the rows, row after row.

        ``ids`` has those of a slot from ``first`` [slots] on; ``first`` is advanced past them.
        """
        block_table_ops.append_pages(
            self.entries, self.tokens, slots, wanted, self._rooms, ids, first
        )


class Sections:
    """Kernel inputs for some tables: views on a CPU, copies in the memory of another device.

    Views are always current; copies are current for the slots that were renewed.
    """

    def __init__(self, tables: Sequence[SectionTable], device: Device) -> None:
        self.tables, self.device = tables, device
        self._moved = [set[int]() for _ in tables]
        self._pages = [device.put(table.entries) for table in tables]
        self._tokens = None if device.is_host else device.put(_token_counts(tables, slice(None)))
        tokens = [device.put(t.tokens) for t in tables] if self._tokens is None else self._tokens
        parts = list(zip(tables, self._pages, tokens, strict=True))
        layers = len(tables[0].pages)
        self.of_layer = [[_section(*part, layer) for part in parts] for layer in range(layers)]
        """Sections of each layer, one for each table."""
        self.every_layer = [_all_rows(*part) for part in parts]
        """One section per table with all layers: slot s of layer l is slot ``l * slots + s``."""

    def moved(self, slot: int, table: int | None = None) -> None:
        """Mark the page ids of a slot as changed; ``table``: only there."""
        if not self.device.is_host:
            for moved in self._moved if table is None else [self._moved[table]]:
                moved.add(slot)

    def renew(self, slots: Ids) -> None:
        """Copy the current state of these slots to the device.

        Two copies, and two more for each table with changed page ids.
        """
        if self._tokens is None:
            return
        at = self.device.put(slots.astype(np.int64))
        self._tokens[:, :, at] = self.device.put(_token_counts(self.tables, slots))
        wanted = set(slots.tolist())
        for table, pages, moved in zip(self.tables, self._pages, self._moved, strict=True):
            renewed = sorted(moved & wanted)
            if renewed:
                at = self.device.put(np.array(renewed, np.int64))
                pages[:, at] = self.device.put(table.entries[:, renewed])
                moved.difference_update(renewed)


def _token_counts(tables: Sequence[SectionTable], slots: Ids | slice) -> Ids:
    """Tokens of each table and row: [tables, layers, slots, kv_heads]."""
    return np.stack([table.tokens[:, slots] for table in tables])


def _section(table: SectionTable, pages: Tensor, tokens: Tensor, layer: int) -> Section:
    return Section(table.layout, pages[layer], tokens[layer], table.backward)


def _all_rows(table: SectionTable, pages: Tensor, tokens: Tensor) -> Section:
    pages = pages.view(-1, *pages.shape[2:])
    return Section(table.layout, pages, tokens.view(-1, tokens.shape[2]), table.backward)
