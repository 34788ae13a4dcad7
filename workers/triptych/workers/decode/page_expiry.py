# numpy's comparisons lack types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Expiry: pages of layers with a sliding window leave a request when no later token reads them."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from triptych.kernels.pages import segments
from triptych.workers.decode.checkpoint import Checkpoint
from triptych.workers.kv.block_table import Sections
from triptych.workers.kv.device_pages import NO_PAGES, DevicePages
from triptych.workers.kv.method_tables import MethodTables

Ids = NDArray[np.int32]
Mask = NDArray[np.bool_]


def expired_pages(positions: Ids, tokens: Ids, first_read: Ids) -> Mask:
    """The pages of some rows of whose tokens none is read any more.

    Shapes:  positions [rows, pages, tokens of a page]; tokens [rows], those that a row has;
             first_read [rows], the first position that is read -> [rows, pages]

    >>> positions = np.arange(6, dtype=np.int32).reshape(1, 3, 2)
    >>> expired_pages(positions, np.array([5]), np.array([2])).tolist()
    [[True, False, False]]
    """
    _, pages, room = positions.shape
    first = np.arange(pages * room).reshape(pages, room)
    is_stored = first < tokens[:, None, None]
    is_read = is_stored & (positions >= first_read[:, None, None])
    return is_stored[..., 0] & ~is_read.any(2)


@dataclass
class PageExpiry:
    """Removes expired pages from the high tables of the slots of one method.

    There, layers with a sliding window have all their tokens behind the sink and before the recent
    window.
    """

    memory: DevicePages
    checkpoint: Checkpoint
    sections: Sections
    tables: MethodTables

    @cached_property
    def _layers(self) -> Ids:
        """Layers with a sliding window."""
        return np.flatnonzero(self.tables.plan.windows).astype(np.int32)

    def _first_read(self, now: int) -> Ids:
        """The first position that is read of each of their rows, from the token at ``now`` on."""
        plan = self.tables.plan
        first = [plan.first_read(now, window) for window in plan.windows if window]
        return np.repeat(np.array(first, np.int32), plan.geometry.kv_heads)

    def positions(self, slots: Ids) -> Tensor:
        """Positions of the tokens in the pages that may expire, on the device, int32.

        Returns: [requests, rows of layers with a window, pages of a row, tokens of a page]
        """
        table = self.tables.classes.tables[0]
        tokens = self._tokens(slots)
        width = table.layout.pages(int(tokens.max(initial=0)))
        pages = table.pages[np.ix_(self._layers, slots)][..., :width].swapaxes(0, 1)
        used = np.arange(width) < -(-tokens // np.int32(table.layout.tokens))[..., None]
        at = self.memory.device.put(np.where(used, pages.reshape(*tokens.shape, width), 0))
        return segments(self.memory.near, table.layout).positions[at.long()]

    def remove(self, slot: int, now: int, positions: Ids) -> Ids:
        """Remove the pages of a slot that no token from position ``now`` on reads.

        ``positions``: those of the slot (``positions``), on the host.

        Returns: the ids of the pages
        """
        tokens = self._tokens(np.array([slot], np.int32))[0]
        expired = expired_pages(positions, tokens, self._first_read(now))
        if not expired.any():
            return NO_PAGES
        entries, tokens = self.tables.classes.of_slot(slot)
        room, removed = np.int32(self.tables.plan.high.tokens), list[Ids]()
        kv_heads = entries.shape[1]
        for row in np.flatnonzero(expired.any(1)):
            layer, head = self._layers[row // kv_heads], row % kv_heads
            gone = np.flatnonzero(expired[row]).astype(np.int32)
            stored = int(tokens[0, layer, head])
            used = -(-stored // int(room))
            pages = entries[layer, head, :used].copy()
            removed.append(pages[gone])
            entries[layer, head, : used - gone.size] = np.delete(pages, gone)
            tokens[0, layer, head] = stored - tokens_in(gone, stored, int(room))
        self.checkpoint.replace_classes(slot, entries, tokens)
        self.sections.moved(slot)
        return np.concatenate(removed)

    def _tokens(self, slots: Ids) -> Ids:
        """Tokens in each row of a layer with a window, [requests, rows]."""
        counts: Ids = self.tables.classes.tables[0].tokens[np.ix_(self._layers, slots)]
        return counts.swapaxes(0, 1).reshape(len(slots), -1)


def tokens_in(pages: Ids, stored: int, room: int) -> int:
    """Tokens in some pages of a row that has ``stored`` tokens: all pages but its last are full.

    >>> tokens_in(np.array([0, 2]), stored=70, room=32)
    38
    """
    return int(np.minimum(room, stored - pages * room).sum())
