# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# numpy's comparisons lack types.
"""Prefetch of the pages of an arena on disk: all pages that a layer reads are requested at once.

A kernel that touches a page on disk blocks one thread for a whole disk access. Once a layer has
selected its pages, the disk gets all of them in one request. Pages that were read a step ago are
still in memory, so they are not requested again.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from triptych.kernels import PageLists
from triptych.kvpool import Arena
from triptych.workers.kv.block_table import SectionTable

Ids = NDArray[np.int32]
Mask = NDArray[np.bool_]

RECENT_STEPS = 1
"""For this many steps after a read, a page is assumed to be in memory: the system evicts the least
recently used pages, and a step reads only part of what memory holds."""


class Prefetcher:
    """Prefetches the pages that each layer of a decode step reads."""

    def __init__(self, arena: Arena, tables: Sequence[SectionTable]) -> None:
        self._arena, self._tables = arena, tables
        self._read_at = np.full(arena.pages, -1 - RECENT_STEPS, np.int64)
        """The last step that read each page."""
        self._step = 0

    @classmethod
    def of(cls, arena: Arena, tables: Sequence[SectionTable]) -> "Prefetcher | None":
        """None if the arena is in memory."""
        return cls(arena, tables) if arena.is_on_disk else None

    def begin_step(self) -> None:
        self._step += 1

    def layer(self, layer: int, slots: Ids, lists: PageLists | None) -> None:
        """Request the pages that a layer reads for these slots.

        ``lists``: the page lists of the attention kernel; None: every request reads all pages.
        """
        ids = pages_read(self._tables, layer, slots, lists)
        missing = ids[self._read_at[ids] < self._step - RECENT_STEPS]
        self._read_at[ids] = self._step
        self._arena.will_need(missing)


def pages_read(
    tables: Sequence[SectionTable], layer: int, slots: Ids, lists: PageLists | None
) -> Ids:
    """Ids of the pages that a layer reads, in no order.

    Source: TinyServe (pages that rank are fetched from where they are)
    """
    parts = [_pages(table, layer, slots) for table in tables]
    ids, is_held = (np.concatenate(part, axis=2) for part in zip(*parts, strict=True))
    if lists is None:
        return ids[is_held]
    # Lists count the used pages of a row over all tables: move those to the front, in order.
    held = np.argsort(~is_held, axis=2, kind="stable")
    rows, ordinals = lists.rows.numpy(), lists.ordinals.numpy()
    reads_all = rows < 0
    wanted = ordinals[rows, :, : ids.shape[2]]
    is_wanted: Mask = np.arange(wanted.shape[2]) < lists.counts.numpy()[rows, :, None]
    places = np.take_along_axis(held, np.where(is_wanted, wanted, 0), axis=2)
    chosen = np.take_along_axis(ids, places, axis=2)[~reads_all][is_wanted[~reads_all]]
    return np.concatenate([ids[reads_all][is_held[reads_all]], chosen])


def _pages(table: SectionTable, layer: int, slots: Ids) -> tuple[Ids, Mask]:
    """Pages of the pool of rows, [slots, kv_heads, width], and a mask of the used entries."""
    counts = -(-table.tokens[layer, slots] // np.int32(table.layout.tokens))
    width = int(counts.max(initial=0))
    ids = table.pages[layer, slots, :, :width] // np.int32(table.layout.parts)
    return ids, np.arange(width) < counts[..., None]
