"""Retirement of recent pages: tokens that leave the window move to high and low pages.

So many recent pages retire at a time that they free the bytes of a high page, once none of their
tokens is in the window. Their tokens are encoded in the high format, and less significant high
tokens are downgraded or dropped: by thresholds (``plan_retirement``), or, for methods that keep a
budget while they generate, those with the least attention (``plan_eviction``). All head rows of all
slots are planned and moved together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.core.policy import Thresholds
from triptych.kernels import (
    Retirement,
    Section,
    block_table_ops,
    move_tokens,
    plan_eviction,
    plan_retirement,
    stored_mass_limits,
)
from triptych.workers.decode.checkpoint import LOWERED, Checkpoint
from triptych.workers.kv.block_table import Sections
from triptych.workers.kv.device_pages import NO_PAGES, DevicePages
from triptych.workers.kv.method_tables import MethodTables

Ids = NDArray[np.int32]


@dataclass(frozen=True)
class RetirementPlan:
    """The retirement of the oldest recent pages of each head row of some slots."""

    slots: Ids
    plan: Retirement[Ids]
    """Arrays begin [layers, requests, kv_heads]."""

    def of(self, requests: Sequence[int]) -> "RetirementPlan":
        """The plan of some of the requests."""
        if len(requests) == len(self.slots):
            return self
        return RetirementPlan(self.slots[requests], Retirement(self.plan.numbers[:, requests]))


PLANNED, DOWNGRADED, ENCODED = 1, 2, 3
"""Phases of a retirement."""
NONE = -1
"""No place: a token that is not downgraded (``Retirement``)."""
RECENT, HIGH, LOW = range(3)
"""Tables of a method that compresses."""
EVERY_TOKEN = 2**30
"""A budget that no sequence reaches."""


class Window:
    """The recent window of the slots of one method: recent pages behind those of the sink."""

    def __init__(
        self,
        memory: DevicePages,
        checkpoint: Checkpoint,
        tables: MethodTables,
        sections: Sections | None = None,
    ) -> None:
        """``sections``: kernel views of the checkpoint's tables; None: made when needed."""
        self.memory, self.plan, self.moving = memory, tables.plan, checkpoint.retirements
        self._checkpoint, self._given = checkpoint, sections
        self._places = tables.places
        self.recent, self.high, *low = tables.tables
        self.low = low[0] if low else None
        self.class_tokens = tables.classes.tokens
        self._full_tokens = self.plan.full_recent_tokens
        self._unsettled = list[Ids]()
        """Slots of retirements that are not ended."""
        layers, slots, _ = self.recent.tokens.shape
        self._slots = np.arange(layers * slots, dtype=np.int32).reshape(layers, slots)
        """Slot numbers of each layer in sections that span all layers."""

    @cached_property
    def sections(self) -> Sections:
        """Kernel views of the tables."""
        return self._given or Sections(self._checkpoint.sections, self.memory.device)

    @cached_property
    def _page_places(self) -> list[Tensor]:
        """By number of requests, the places in the recent table of the tokens behind the sink."""
        layers, slots, kv_heads = self.recent.tokens.shape
        first, room = self.plan.sink_tokens, self.plan.retire_tokens
        there = self.memory.device.name
        page = torch.arange(first, first + room, dtype=torch.int32, device=there)
        return [page.expand(layers * requests, kv_heads, room) for requests in range(slots + 1)]

    def is_full(self, slot: int) -> bool:
        """Whether the recent pages behind the sink must retire."""
        return self.recent.length(slot) >= self._full_tokens

    def prepare(
        self,
        slots: Ids,
        seen: Sequence[int],
        thresholds: Thresholds,
        most: Sequence[int] = (),
    ) -> Tensor:
        """Plan the retirement of the pages behind the sink; ``seen``: tokens of each request.

        ``most``: tokens that a head row of each keeps while it generates; 0, or no numbers: all.

        Returns: the numbers of a ``Retirement`` on the device, [layers x requests, kv_heads, ...]

        The tokens of the pages become high. As many older tokens leave the high window and are
        classified by significance: their positions are a fixed distance behind those of the pages.
        With ``most`` those with the least attention are dropped instead.
        """
        self.sections.renew(slots)
        rows = self._retiring_rows(slots, seen)
        if any(most):
            return self._evict(rows, np.array(seen, np.int32), np.array(most, np.int32)).numbers
        return self._classify(rows, thresholds).numbers

    def planned(self, slots: Ids, numbers: Ids) -> RetirementPlan:
        """The plan of a retirement; ``numbers``: what ``prepare`` returned, on the host."""
        layers, _, kv_heads, _ = self.recent.pages.shape
        numbers = numbers.reshape(layers, len(slots), kv_heads, -1)
        self._append_in_windows(numbers, slots)
        return RetirementPlan(slots, Retirement(numbers))

    def _classify(self, rows: Ids, thresholds: Thresholds) -> Retirement[Tensor]:
        """Plan a retirement by thresholds; ``rows``: as ``_retiring_rows``."""
        batch, now, leaving = map(self.memory.device.put, rows)
        high, low = self._class_sections()
        return plan_retirement(
            self.memory.near,
            high,
            low,
            batch,
            now,
            leaving,
            self._limits(rows, thresholds),
            count=self.plan.retire_tokens,
        )

    def _evict(self, rows: Ids, seen: Ids, most: Ids) -> Retirement[Tensor]:
        """Plan a retirement by budgets: half of each for the newest tokens.

        Recent tokens count, and a row may hold the tokens of one retirement beside them, however
        small its budget is.
        """
        retire, put = self.plan.retire_tokens, self.memory.device.put
        behind = np.maximum(most - (self._full_tokens - retire), retire)
        behind = np.where(most > 0, behind, EVERY_TOKEN).astype(np.int32)
        newest = (seen - most // 2).astype(np.int32)
        layers = self.recent.tokens.shape[0]
        of_rows = (put(np.tile(each, layers)) for each in (behind, newest))
        high, low = self._class_sections()
        longest = int(self.high.tokens.max())
        used = replace(high, pages=high.pages[..., : high.layout.pages(longest)])
        return plan_eviction(self.memory.near, used, low, put(rows[0]), *of_rows, count=retire)

    def _class_sections(self) -> tuple[Section, Section | None]:
        """The high and the low section of all layers."""
        every = self.sections.every_layer
        low = None if self.low is None else every[self._places[LOW]]
        return every[self._places[HIGH]], low

    def _limits(self, rows: Ids, thresholds: Thresholds) -> Tensor:
        """Least significance of a high and of a low token, [layers x requests, kv_heads, 2]."""
        alphas = np.array([thresholds.alpha_high, thresholds.alpha_low])
        now = rows[1].reshape(len(self._scales), -1, 1, 1)
        limits = np.minimum(1.0, alphas * self._scales[:, None, :, None] / now)
        found = self.memory.device.put(limits.reshape(-1, *limits.shape[2:]))
        if thresholds.mass_high > 0:
            found = found.maximum(self._mass_limits(rows, thresholds))
        return torch.stack((found[..., 0], found.amin(-1)), -1)

    def _mass_limits(self, rows: Ids, thresholds: Thresholds) -> Tensor:
        recent, *classes = self._places[: 1 + len(self.plan.classes)]
        slots, now, leaving = map(self.memory.device.put, rows)
        sections = self.sections.every_layer
        return stored_mass_limits(
            self.memory.near,
            [sections[place] for place in classes],
            sections[recent],
            slots,
            now,
            leaving + self.plan.retire_tokens,
            masses=(thresholds.mass_high, thresholds.mass_low),
        )

    @cached_property
    def _scales(self) -> NDArray[np.float64]:
        """Factors of ``alpha_high`` and ``alpha_low`` by head row, [layers, kv_heads]."""
        layers, _, kv_heads, _ = self.recent.pages.shape
        given = self.plan.policy.alpha_scales or (1.0,) * (layers * kv_heads)
        return np.array(given).reshape(layers, kv_heads)

    def _append_in_windows(self, numbers: Ids, slots: Ids) -> None:
        """Have layers with a sliding window append the new tokens and downgrade none.

        Then their pages expire in the order of their tokens.
        """
        layers = np.flatnonzero(self.plan.windows)
        if not layers.size:
            return
        stored = self.high.tokens[layers][:, slots]
        added = np.arange(self.plan.retire_tokens, dtype=np.int32)
        mine = np.full((*stored.shape, numbers.shape[-1]), NONE, np.int32)
        mine[..., 0], mine[..., 1] = stored + np.int32(added.size), 0
        mine[..., 2 : 2 + added.size] = stored[..., None] + added
        numbers[layers] = mine

    def _retiring_rows(self, slots: Ids, seen: Sequence[int]) -> Ids:
        """Rows of all layers, tokens seen, and the oldest position that leaves the high window.

        That position is at least one retirement behind: only tokens in high pages can be
        classified.
        """
        policy, tokens = self.plan.policy, self.recent.tokens
        lag = max(self.plan.retire_tokens, policy.high_window_tokens - policy.window_tokens)
        now = np.array(seen, np.int32)
        return block_table_ops.retirement_inputs(tokens, slots, now, self.plan.sink_tokens, lag)

    def apply(self, retirement: RetirementPlan) -> Ids:
        """Move tokens as planned, into pages that the tables have already.

        Returns: the emptied recent pages of each request, [requests, pages]

        The checkpoint gets the plan first and the phase after each part. A part does not write
        what it reads, so a takeover worker can repeat it. On a GPU the parts are only queued: the
        device records each phase when it is there, so the host does not wait for one. ``settle``
        ends the retirement.
        """
        moving, slots = self.moving, retirement.slots
        numbers = retirement.plan.numbers
        pages, room = self.recent.pages, self.plan.retire_tokens
        kept = moving.recent_pages, moving.plan, moving.retired, moving.retired_after
        block_table_ops.save_retirement(pages, numbers, slots, room, *kept)
        moving.phase[slots] = PLANNED
        is_host = self.memory.device.is_host
        record = self._record if is_host else self._queue_record
        emptied = self._run_phases(retirement, PLANNED, record)
        self._unsettled.append(slots)
        if is_host:
            self.settle()
        return emptied

    def settle(self) -> None:
        """End the retirements since the last call, whose tables are in place already.

        The host waits only if the device has not moved all tokens yet.
        """
        if not self._unsettled:
            return
        slots, self._unsettled = np.concatenate(self._unsettled), []
        if (self.moving.phase[slots] != ENCODED).any():
            self.memory.device.wait()
        self.moving.phase[slots] = 0

    def resume(self, slot: int) -> None:
        """Complete the retirement or lowering that a dead worker had begun for a slot, if any.

        Its tables may be in place already, for work that its device had not begun. Until all tokens
        are moved no other work of the step is done, so the table of recent pages is put back.
        """
        moving, at = self.moving, np.array([slot], np.int32)
        phase = int(moving.phase[slot])
        if phase >= LOWERED:
            self._checkpoint.restore_classes(slot)
        elif phase:
            if phase < ENCODED:
                pages = self.recent.pages
                pages[:, slot] = moving.recent_pages[:, slot, :, : pages.shape[-1]]
            width = Retirement.width(self.plan.retire_tokens)
            retirement = RetirementPlan(at, Retirement(moving.plan[:, at, :, :width]))
            self._run_phases(retirement, phase, self._record)
            moving.phase[slot] = 0

    def _run_phases(
        self, retirement: RetirementPlan, phase: int, record: Callable[[Ids, int], None]
    ) -> Ids:
        """Downgrade first, since the retiring tokens take the places of downgraded tokens."""
        slots = retirement.slots
        if phase <= PLANNED:
            self._downgrade(retirement)
            record(slots, DOWNGRADED)
        if phase <= DOWNGRADED:
            self._encode(retirement)
            record(slots, ENCODED)
        return self._commit(retirement)

    def _record(self, slots: Ids, phase: int) -> None:
        """Record a phase that the device has done."""
        self.memory.device.wait()
        self.moving.phase[slots] = phase

    def _queue_record(self, slots: Ids, phase: int) -> None:
        """Have the device record a phase, in memory of the host, after what is queued so far."""
        there = self.memory.device.put(slots.astype(np.int64))
        self._phases.index_fill_(0, there, phase)

    @cached_property
    def _phases(self) -> Tensor:
        """The phase of each slot, int32 [slots], on the device."""
        return self.memory.device.share_part(self._checkpoint.memory, self.moving.phase)

    def _downgrade(self, retirement: RetirementPlan) -> None:
        if self.low is not None:
            downgraded = self._put(retirement.plan.downgraded)
            self._move(retirement.slots, HIGH, downgraded, LOW, retirement.plan.downgraded_places)

    def _encode(self, retirement: RetirementPlan) -> None:
        page = self._page_places[len(retirement.slots)]
        self._move(retirement.slots, RECENT, page, HIGH, retirement.plan.places)

    def _move(
        self, slots: Ids, source: int, places: Tensor, target: int, target_places: Ids
    ) -> None:
        """Re-encode tokens of some rows of one table in pages of another."""
        memory, sections = self.memory, self.sections
        source, target = self._places[source], self._places[target]
        sections.renew(slots)
        move_tokens(
            memory.near,
            sections.every_layer[source],
            sections.every_layer[target],
            memory.device.put(self._slots[:, slots].ravel()),
            places,
            self._put(target_places),
        )
        table = sections.tables[target]
        memory.queue_save(table.pages_at(slots, target_places) if memory.is_copied else NO_PAGES)

    def _put(self, places: Ids) -> Tensor:
        """Places by layer and request as rows of sections that span all layers."""
        return self.memory.device.put(places.reshape(-1, *places.shape[2:]))

    def _commit(self, retirement: RetirementPlan) -> Ids:
        """Set tables and counts to the state after the retirement; it can be repeated.

        Returns: the emptied recent pages of each request, [requests, pages]
        """
        moving, slots, recent = self.moving, retirement.slots, self.recent
        emptied = block_table_ops.remove_pages(
            recent.pages,
            recent.tokens,
            moving.recent_pages,
            slots,
            self.plan.sink_pages,
            self.plan.retire_pages,
            recent.layout.pages(self._full_tokens),
            self.plan.retire_tokens,
            self.class_tokens,
            retirement.plan.counts,
        )
        moving.retired[slots] = moving.retired_after[slots]
        return emptied
