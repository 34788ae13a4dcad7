# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# numpy's comparisons lack types.
"""Pages of an arena on a disk are read before a step touches them, and many at once.

A page that a kernel touches while it is on disk stops one thread for a whole access. Those that a
step is going to read are known once its queries have chosen: the disk gets all of a layer's
together. What was read a step ago is in memory still, and is not asked for again.
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
"""So many steps after it was read a page is taken to be in memory: the system lets go of what was
not touched for longest, and a step reads a part of what memory holds."""


class Prefetcher:
    """Asks for the pages that each layer of a decode step reads."""

    def __init__(self, arena: Arena, tables: Sequence[SectionTable]) -> None:
        self._arena, self._tables = arena, tables
        self._read_at = np.full(arena.pages, -1 - RECENT_STEPS, np.int64)
        """The step that read each page last."""
        self._step = 0

    @classmethod
    def of(cls, arena: Arena, tables: Sequence[SectionTable]) -> "Prefetcher | None":
        """None if the pages lie in memory."""
        return cls(arena, tables) if arena.is_on_disk else None

    def begin_step(self) -> None:
        self._step += 1

    def layer(self, layer: int, slots: Ids, lists: PageLists | None) -> None:
        """Have the pages read that the requests of these slots read in a layer.

        ``lists``: as the attention kernel gets them; None: all read all of their pages.
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
    # Lists count the pages of a row end to end: put those that are held first, in their order.
    held = np.argsort(~is_held, axis=2, kind="stable")
    rows, ordinals = lists.rows.numpy(), lists.ordinals.numpy()
    reads_all = rows < 0
    wanted = ordinals[rows, :, : ids.shape[2]]
    is_wanted: Mask = np.arange(wanted.shape[2]) < lists.counts.numpy()[rows, :, None]
    places = np.take_along_axis(held, np.where(is_wanted, wanted, 0), axis=2)
    chosen = np.take_along_axis(ids, places, axis=2)[~reads_all][is_wanted[~reads_all]]
    return np.concatenate([ids[reads_all][is_held[reads_all]], chosen])


def _pages(table: SectionTable, layer: int, slots: Ids) -> tuple[Ids, Mask]:
    """Page ids of rows, [slots, kv_heads, width], and which of these are some."""
    counts = -(-table.tokens[layer, slots] // np.int32(table.layout.tokens))
    width = int(counts.max(initial=0))
    return table.pages[layer, slots, :, :width], np.arange(width) < counts[..., None]
