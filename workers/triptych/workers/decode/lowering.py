"""Lowering: whole high pages of a request become low ones, because memory is short.

The least significant pages go first, the oldest ones where significance is equal or not measured.
Only full pages without a token of the high window are lowered: then no page has gaps, and the new
table is known before a token moves. Those of layers with a sliding window leave soon, and are not.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from triptych.kernels import Section, move_tokens
from triptych.kernels.pages import segments
from triptych.workers.decode.checkpoint import Checkpoint
from triptych.workers.kv.block_table import Sections
from triptych.workers.kv.device_pages import NO_PAGES, DevicePages
from triptych.workers.kv.method_tables import MethodTables

Ids = NDArray[np.int32]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class LoweringPlan:
    """The high pages of each head row that are lowered, and how many low pages they take."""

    columns: Sequence[Ids]
    """Indices into the high pages of each head row, ascending."""
    new_pages: Ids
    """Low pages that each head row needs more."""


def pages_to_lower(cold: Ids, low_tokens: Ids, wanted: int, room: int, low_room: int) -> Ids:
    """High pages of each head row to lower, so that ``wanted`` pages are freed in all.

    Every head row frees as many as the others, as far as it has cold pages, and lowers the fewest
    that do. Less than ``wanted`` is freed if all that helps is lowered.

    ``cold``: high pages of each head row that may be lowered. ``low_tokens``: its low tokens.
    ``room``, ``low_room``: tokens of a high and of a low page; ``low_room`` is not less.

    >>> cold, low = np.array([[3, 1, 4], [0, 2, 0]], np.int32)
    >>> pages_to_lower(cold, low, 2, room=32, low_room=44)
    array([0, 1, 4], dtype=int32)
    """
    lowered: Ids = np.arange(int(cold.max(initial=0)) + 1, dtype=np.int32)
    before = _pages(low_tokens, low_room)[:, None]
    after = _pages(low_tokens[:, None] + lowered * np.int32(room), low_room)
    freed: Ids = lowered - (after - before)  # one more lowered page frees one more, or none
    most: Ids = freed[np.arange(len(cold)), cold]
    level, top = 0, int(most.max(initial=0))
    while level < top and int(np.minimum(most, level).sum()) < wanted:
        level += 1
    reached: Mask = np.greater_equal(freed, np.minimum(most, level)[:, None])
    return np.argmax(reached, axis=1).astype(np.int32)


def _pages(tokens: Ids, room: int) -> Ids:
    """Pages of ``room`` tokens that some numbers of tokens take."""
    return -(-tokens // np.int32(room))


class Lowering:
    """Lowers high pages of the slots of one method, which has a low class."""

    def __init__(
        self, memory: DevicePages, checkpoint: Checkpoint, sections: Sections, tables: MethodTables
    ) -> None:
        self._memory, self._checkpoint, self._sections = memory, checkpoint, sections
        self._plan, self._class_table = tables.plan, tables.classes
        self._high_table, self._low_table = tables.classes.tables
        self._low = self._low_table.layout
        windows = np.array(tables.plan.windows) > 0
        self._in_window = np.repeat(windows, tables.plan.geometry.kv_heads)
        """Head rows of layers with a sliding window."""

    def prepare(self, slot: int, seen: int, wanted: int) -> LoweringPlan:
        """Choose pages of a slot that free ``wanted`` pages; ``seen``: tokens of the sequence."""
        cold, order = self._cold_pages(slot, seen)
        low_tokens = self._low_table.tokens[:, slot].ravel()
        room, low_room = self._plan.high.tokens, self._low.tokens
        counts = pages_to_lower(cold, low_tokens, wanted, room, low_room)
        after: Ids = low_tokens + counts * np.int32(room)
        return LoweringPlan(
            [np.sort(row[:count]) for row, count in zip(order, counts.tolist(), strict=True)],
            _pages(after, low_room) - _pages(low_tokens, low_room),
        )

    def _cold_pages(self, slot: int, seen: int) -> tuple[Ids, Ids]:
        """Number of cold pages of each head row, and columns of its pages, the coldest first."""
        table, device = self._high_table, self._memory.device
        full = (table.tokens[:, slot] // table.layout.tokens).ravel()
        width = int(full.max(initial=0))
        full[self._in_window] = 0
        is_full = np.arange(width) < full[:, None]
        ids = np.where(is_full, table.pages[:, slot, :, :width].reshape(len(full), width), 0)
        parts, at = segments(self._memory.near, table.layout), device.put(ids).long()
        positions = parts.positions[at]
        significance = (parts.scores[at] / (seen - positions)).mean(-1)
        first_young = seen - self._plan.policy.high_window_tokens
        is_cold = device.put(is_full) & (positions.amax(-1) < first_young)
        order = torch.where(is_cold, significance, torch.inf).argsort(dim=1, stable=True)
        return is_cold.sum(1).int().cpu().numpy(), order.int().cpu().numpy()

    def apply(self, slot: int, plan: LoweringPlan, ids: Ids) -> Ids:
        """Lower pages as planned, as far as ``ids`` suffice for the low pages.

        In rounds: the high pages that a round has freed are low pages of the next one, so one page
        is enough to begin.

        Returns: the page ids that are in no row any more, or were not needed
        """
        left = {row: columns for row, columns in enumerate(plan.columns) if columns.size}
        while left:
            chosen, used = self._next_round(slot, left, ids.size)
            if not chosen:
                break
            ids = np.concatenate([ids[used:], self._lower(slot, chosen, ids[:used])])
            for row, columns in chosen.items():
                left[row] = left[row][: -columns.size]
            left = {row: columns for row, columns in left.items() if columns.size}
        return ids

    def _next_round(
        self, slot: int, left: dict[int, Ids], pages: int
    ) -> tuple[dict[int, Ids], int]:
        """The columns of some rows that fit into so many low pages, and how many they take.

        Of a row the last ones, since those in front of them keep their places. A part of a row is
        taken only if no whole one fits.
        """
        room, low_room = self._plan.high.tokens, self._low.tokens
        before: list[int] = self._low_table.tokens[:, slot].ravel().tolist()

        def needed(row: int, count: int) -> int:
            return self._low.pages(before[row] + count * room) - self._low.pages(before[row])

        chosen, used = dict[int, Ids](), 0
        for row in sorted(left, key=lambda row: needed(row, left[row].size)):
            wanted = left[row].size
            if needed(row, wanted) > pages - used:
                free = (self._low.pages(before[row]) + pages - used) * low_room - before[row]
                wanted = 0 if chosen else free // room
            if not wanted:
                break
            chosen[row] = left[row][-wanted:]
            used += needed(row, wanted)
        return chosen, used

    def _lower(self, slot: int, columns: dict[int, Ids], new: Ids) -> Ids:
        """Lower pages of some head rows; ``new`` are the low pages that they need.

        Tokens are written to places that no table counts. Then the checkpoint gets the new tables,
        and one store makes them valid.

        Returns: the ids of the lowered pages
        """
        high, low = self._high_table, self._low_table
        room, kv_heads = high.layout.tokens, high.pages.shape[2]
        pages, tokens = self._class_table.of_slot(slot)
        low_pages = low.pages[:, slot].copy()
        most = max(chosen.size for chosen in columns.values()) * room
        places = np.full((*tokens.shape[1:], most), -1, np.int32)
        targets, freed, written = places.copy(), list[Ids](), list[Ids]()
        for row, chosen in columns.items():
            at = divmod(row, kv_heads)
            count, before = chosen.size * room, int(tokens[1][at])
            first, last = low.layout.pages(before), low.layout.pages(before + count)
            low_pages[at][first:last], new = new[: last - first], new[last - first :]
            places[at][:count] = (chosen[:, None] * room + np.arange(room)).ravel()
            targets[at][:count] = np.arange(before, before + count)
            mine = pages[at][: high.layout.pages(int(tokens[0][at]))]
            freed.append(mine[chosen])
            kept = np.delete(mine, chosen)
            pages[at][: kept.size] = kept
            pages[at][pages.shape[2] - last :] = low_pages[at][:last][::-1]
            written.append(low_pages[at][before // low.layout.tokens : last])
            tokens[0][at] -= count
            tokens[1][at] += count
        self._move(slot, low_pages, places, targets)
        self._memory.save(np.concatenate(written) if self._memory.is_copied else NO_PAGES)
        moved = int(np.count_nonzero(targets >= 0))
        self._checkpoint.replace_classes(slot, pages, tokens, moved)
        self._sections.moved(slot)
        return np.concatenate(freed)

    def _move(self, slot: int, low_pages: Ids, places: Ids, targets: Ids) -> None:
        """Re-encode high tokens of a slot in low pages, [layers, kv_heads, pages of a row]."""
        put, high = self._memory.device.put, self._high_table
        counts = put(high.tokens[:, slot].copy())
        move_tokens(
            self._memory.near,
            Section(high.layout, put(high.pages[:, slot].copy()), counts),
            Section(self._low, put(low_pages), counts),
            put(np.arange(len(low_pages), dtype=np.int32)),
            put(places),
            put(targets),
        )
