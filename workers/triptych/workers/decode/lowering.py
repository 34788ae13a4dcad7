"""Lowering: whole high pages of a request become low ones, because memory is short.

The least significant pages go first, the oldest ones where significance is equal or not measured.
Only full pages without a token of the high window are lowered: then no page has gaps, and the new
table is known before a token moves. Those of layers with a sliding window leave soon, and are not.

A device ranks the pages of all requests of a step together and then moves tokens, and the host
waits for neither: ranks are read with the plans of retirements, and a lowered request takes no part
in the step, at whose end its freed pages go back to the pool.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.core.messages import ROUTER, Lower, Lowered, Send
from triptych.kernels import Section, move_tokens
from triptych.kernels.pages import segments
from triptych.workers.decode.checkpoint import LOWERED, Checkpoint
from triptych.workers.decode.handover import RequestHandover
from triptych.workers.decode.page_growth import PageGrowth
from triptych.workers.decode.page_selection import Selector
from triptych.workers.decode.running_batch import RunningRequest
from triptych.workers.device import read_together
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

    def prepare(self, slot: int, ranks: Ids, wanted: int) -> LoweringPlan:
        """Choose pages of a slot that free ``wanted`` pages; ``ranks``: see ``rank``."""
        cold, order = ranks[:, 0], ranks[:, 1:]
        low_tokens = self._low_table.tokens[:, slot].ravel()
        room, low_room = self._plan.high.tokens, self._low.tokens
        counts = pages_to_lower(cold, low_tokens, wanted, room, low_room)
        after: Ids = low_tokens + counts * np.int32(room)
        return LoweringPlan(
            [np.sort(row[:count]) for row, count in zip(order, counts.tolist(), strict=True)],
            _pages(after, low_room) - _pages(low_tokens, low_room),
        )

    def rank(self, slot: int, seen: int) -> Tensor:
        """Number of cold pages of each head row, then columns of its pages, the coldest first.

        ``seen``: tokens of the sequence.

        Returns: int32 [head rows, 1 + pages], on the device
        """
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
        return torch.cat((is_cold.sum(1, keepdim=True), order), 1).int()

    def apply(self, slot: int, plan: LoweringPlan, ids: Ids) -> Ids:
        """Lower pages as planned, as far as ``ids`` suffice for the low pages.

        In rounds: the high pages that a round has freed are low pages of the next one, so one page
        is enough to begin. The tables of the host are changed at once. On a GPU tokens are moved
        later: the device itself records in the checkpoint which table is valid.

        Returns: the page ids that are in no row any more, or were not needed. They are free when
                 the phase of the slot is 0.
        """
        left = {row: columns for row, columns in enumerate(plan.columns) if columns.size}
        rounds = 0
        while left:
            chosen, used = self._next_round(slot, left, ids.size)
            if not chosen:
                break
            if rounds:
                self._record_tables(slot, rounds % 2)
            else:
                self._checkpoint.keep_classes(slot)
            rounds += 1
            ids = np.concatenate([ids[used:], self._lower(slot, chosen, ids[:used])])
            for row, columns in chosen.items():
                left[row] = left[row][: -columns.size]
            left = {row: columns for row, columns in left.items() if columns.size}
        if rounds:
            self._record_phase(slot, 0)
        return ids

    def _record_tables(self, slot: int, at: int) -> None:
        """Record the tables of a round, before the next one writes to pages that it has freed."""
        put, (entries, tokens, lowered) = self._memory.device.put, self._valid
        checkpoint, (ids, counts) = self._checkpoint, self._class_table.of_slot(slot)
        entries[at, :, slot].copy_(put(ids))
        tokens[at, : len(counts), :, slot].copy_(put(counts))
        lowered[at, slot : slot + 1].copy_(put(checkpoint.lowered[slot : slot + 1].copy()))
        self._record_phase(slot, LOWERED + at)

    def _record_phase(self, slot: int, phase: int) -> None:
        """Have the device record a phase, in memory of the host, after what is queued so far."""
        self._phases[slot : slot + 1].fill_(phase)

    @cached_property
    def _phases(self) -> Tensor:
        checkpoint = self._checkpoint
        return self._memory.device.share_part(checkpoint.memory, checkpoint.retirements.phase)

    @cached_property
    def _valid(self) -> tuple[Tensor, Tensor, Tensor]:
        """The arrays of ``ValidTables``, on the device."""
        memory, valid, share = self._checkpoint.memory, self._checkpoint.valid, self._memory.device
        arrays = valid.valid_entries, valid.valid_tokens, valid.valid_lowered
        entries, tokens, lowered = (share.share_part(memory, array) for array in arrays)
        return entries, tokens, lowered

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

        Tokens are written to places that no valid table counts. The phase of the slot tells which
        table is valid.

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
        self._memory.queue_save(np.concatenate(written) if self._memory.is_copied else NO_PAGES)
        self._checkpoint.lowered[slot] += np.count_nonzero(targets >= 0)
        table = self._class_table
        table.entries[:, slot], table.tokens[:, :, slot] = pages, tokens
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


@dataclass(frozen=True)
class Wanted:
    """Pages that a request should free."""

    request: RunningRequest
    pages: int
    number: int = 0
    """Number of the router's message; 0: the worker does it to keep within a limit."""


@dataclass(frozen=True)
class Moving:
    """A lowering whose tokens the device may not have moved yet."""

    wanted: Wanted
    pages_before: int
    """Pages that the request held before."""
    left: int
    """Pages that are in no row any more; 0: nothing was lowered."""


class RequestLowerings:
    """Lowers running requests: those that the router names, and those that near their limit."""

    def __init__(
        self,
        lowerings: Mapping[MethodTables, Lowering],
        growth: PageGrowth,
        handover: RequestHandover,
        selector: Selector | None,
        checkpoint: Checkpoint,
        memory: DevicePages,
    ) -> None:
        """``lowerings``: of each method with a low class."""
        self._lowerings, self._growth, self._handover = lowerings, growth, handover
        self._selector, self._checkpoint, self._device = selector, checkpoint, memory.device
        self._asked = dict[str, Lower]()
        """What the router has asked for since the last step, by request."""
        self._moving = list[Moving]()

    def accept(self, message: Lower, one: RunningRequest | None) -> list[Send]:
        """Lower a request: at the next step, or at once if that needs no device.

        Not if its last step was cut short: what that step has done must stay where it is.
        """
        if one is None or message.request in self._asked or not self._can_lower(one):
            return [_answer(message)]
        if not self._device.is_host:
            self._asked[message.request] = message
            return []
        wanted = [Wanted(one, message.pages, message.number)]
        self.apply(wanted, read_together(self.rank(wanted)))
        return self.settle()

    @property
    def has_work(self) -> bool:
        """Whether the router waits for a request to be lowered."""
        return bool(self._asked)

    def abandon(self) -> None:
        """Forget what is under way, with all requests."""
        self._asked.clear()
        self._moving.clear()

    def take(self, running: Mapping[str, RunningRequest]) -> tuple[list[Wanted], list[Send]]:
        """Requests to lower in this step, and answers to the router about those that cannot be.

        They are those that the router named since the last step, and those that near their limit.
        """
        asked, self._asked = self._asked, {}
        wanted, sends = list[Wanted](), list[Send]()
        for name, message in asked.items():
            one = running.get(name)
            if one is None or not self._can_lower(one):
                sends.append(_answer(message))
            else:
                wanted.append(Wanted(one, message.pages, message.number))
        for one in running.values():
            lacking = _lacking(one)
            if lacking > 0 and one.id not in asked and self._can_lower(one):
                wanted.append(Wanted(one, lacking))
        return wanted, sends

    def rank(self, wanted: Iterable[Wanted]) -> list[Tensor]:
        """Have the device rank the pages of each request (``Lowering.rank``)."""
        ones = [each.request for each in wanted]
        return [self._lowerings[one.tables].rank(one.slot, one.position) for one in ones]

    def apply(self, wanted: Sequence[Wanted], ranks: Sequence[Ids]) -> None:
        """Lower requests whose ranks are on the host."""
        for each, mine in zip(wanted, ranks, strict=True):
            one, before = each.request, each.request.num_pages
            lowering = self._lowerings[one.tables]
            plan = lowering.prepare(one.slot, mine, each.pages)
            ids = self._growth.allocate_for(one, int(plan.new_pages.sum()))
            left = lowering.apply(one.slot, plan, ids)
            self._moving.append(Moving(each, before, left.size))
            if left.size and self._selector is not None:
                self._selector.leave(one.slot)
                self._selector.join(one.slot, one.options.selection)

    def moving(self) -> set[RunningRequest]:
        """Requests whose tokens are being moved: they take no part in this step."""
        return {each.wanted.request for each in self._moving if each.left}

    def settle(self) -> list[Send]:
        """Free the pages that are not needed any more, and tell the router.

        The host waits only if the device has not moved all tokens yet.
        """
        moving, self._moving = self._moving, []
        slots = [each.wanted.request.slot for each in moving]
        if self._checkpoint.retirements.phase[slots].any():
            self._device.wait()
        ended = [(each.wanted.number, self._end(each)) for each in moving]
        return [Send(ROUTER, lowered) for number, lowered in ended if number or lowered.freed]

    def _end(self, moving: Moving) -> Lowered:
        one, number = moving.wanted.request, moving.wanted.number
        one.num_pages -= moving.left
        if not moving.left:
            return Lowered(request=one.id, number=number)
        self._handover.renew_lease(one)
        tokens, freed = (
            self._checkpoint.lowered_tokens(one.slot),
            moving.pages_before - one.num_pages,
        )
        one.output.note_lowered(tokens)
        if number and freed and one.limit is not None:
            one.limit = replace(one.limit, pages=one.limit.pages - freed)
        return Lowered(
            request=one.id,
            number=number,
            freed=freed,
            pages=one.num_pages,
            tokens=one.position,
            lowered_tokens=tokens,
        )

    def _can_lower(self, one: RunningRequest) -> bool:
        return one.tables in self._lowerings and not self._handover.is_mid_step(one)


def _lacking(one: RunningRequest) -> int:
    """Pages that a request must free before it needs more than a limit at which it may not ask."""
    rows = one.tables.plan.geometry.head_rows  # so many pages let the next lowering begin
    if one.limit is None or not one.limit.lowers or one.is_paused:
        return 0
    return int(one.step_pages + rows - one.spare_pages)


def _answer(message: Lower) -> Send:
    """Nothing was lowered."""
    return Send(ROUTER, Lowered(request=message.request, number=message.number))
