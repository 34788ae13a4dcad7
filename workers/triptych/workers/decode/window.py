"""Retirement of raw pages: tokens that leave the 16-bit window move to high and low pages.

A raw page retires as a whole, once none of its tokens is in the window. Its tokens are encoded in
the high format, and less significant high tokens are downgraded or dropped (``plan_retirement``).
All head rows of all slots are planned and moved together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.kernels import Retirement, block_table_ops, move_tokens, plan_retirement
from triptych.workers.decode.checkpoint import Checkpoint
from triptych.workers.kv.block_table import Sections
from triptych.workers.kv.device_pages import NO_PAGES, DevicePages

Ids = NDArray[np.int32]


@dataclass(frozen=True)
class RetirementPlan:
    """The retirement of one raw page of each head row of some slots."""

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
RAW, HIGH, LOW = range(3)
"""Tables of a checkpoint."""


class Window:
    """The recent window of every slot: raw pages behind those of the sink."""

    def __init__(
        self, memory: DevicePages, checkpoint: Checkpoint, sections: Sections | None = None
    ) -> None:
        """``sections``: kernel views of the checkpoint's tables; None: made when needed."""
        self.memory, self.plan, self.moving = memory, checkpoint.plan, checkpoint.retirements
        self._checkpoint, self._given = checkpoint, sections
        self.raw, self.high, *low = checkpoint.tables
        self.low = low[0] if low else None
        self.class_tokens = checkpoint.class_table.tokens
        self._full_tokens = self.plan.full_raw_tokens
        layers, slots, _ = self.raw.tokens.shape
        self._slots = np.arange(layers * slots, dtype=np.int32).reshape(layers, slots)
        """Slot numbers of each layer in sections that span all layers."""

    @cached_property
    def sections(self) -> Sections:
        """Kernel views of the tables."""
        return self._given or Sections(self._checkpoint.sections, self.memory.device)

    @cached_property
    def _page_places(self) -> list[Tensor]:
        """By number of requests, the places in the raw table of the page behind the sink."""
        layers, slots, kv_heads = self.raw.tokens.shape
        first, room = self.plan.sink_tokens, self.raw.layout.tokens
        there = self.memory.device.name
        page = torch.arange(first, first + room, dtype=torch.int32, device=there)
        return [page.expand(layers * requests, kv_heads, room) for requests in range(slots + 1)]

    def is_full(self, slot: int) -> bool:
        """Whether a raw page of a slot must retire; at most one at a time."""
        return self.raw.length(slot) == self._full_tokens

    def prepare(
        self, slots: Ids, seen: Sequence[int], least_alpha_low: float = 0.0
    ) -> RetirementPlan:
        """Plan the retirement of the page behind the sink; ``seen``: tokens of each request.

        ``least_alpha_low``: lower bound of the policy's ``alpha_low``.

        The tokens of the page become high. As many older tokens leave the high window and are
        classified by significance: their positions are a fixed distance behind those of the page.
        """
        layers, _, kv_heads, _ = self.raw.pages.shape
        alpha_high, alpha_low = self.plan.policy.answer_alphas
        alpha_low = min(max(alpha_low, least_alpha_low), alpha_high)
        sections, put = self.sections, self.memory.device.put
        sections.renew(slots)
        plan = plan_retirement(
            self.memory.near,
            sections.every_layer[HIGH],
            sections.every_layer[LOW] if self.low is not None else None,
            *map(put, self._retiring_rows(slots, seen)),
            count=self.raw.layout.tokens,
            alpha_high=alpha_high,
            alpha_low=alpha_low,
        )
        numbers = plan.numbers.cpu().numpy()
        return RetirementPlan(slots, Retirement(numbers.reshape(layers, len(slots), kv_heads, -1)))

    def _retiring_rows(self, slots: Ids, seen: Sequence[int]) -> Ids:
        """Rows of all layers, tokens seen, and the oldest position that leaves the high window.

        That position is at least one page behind: only tokens in high pages can be classified.
        """
        policy, raw = self.plan.policy, self.raw
        lag = max(raw.layout.tokens, policy.high_window_tokens - policy.window_tokens)
        now = np.array(seen, np.int32)
        return block_table_ops.retirement_inputs(raw.tokens, slots, now, self.plan.sink_tokens, lag)

    def apply(self, retirement: RetirementPlan) -> None:
        """Move tokens as planned, into pages that the tables have already.

        The emptied raw pages are the next ones of their rows.

        The checkpoint gets the plan first and the phase after each part. A part does not write
        what it reads, so a takeover worker can repeat it.
        """
        moving, slots = self.moving, retirement.slots
        numbers = retirement.plan.numbers
        raw, kept = self.raw, (moving.raw_pages, moving.plan, moving.retired, moving.retired_after)
        block_table_ops.save_retirement(raw.pages, numbers, slots, raw.layout.tokens, *kept)
        moving.phase[slots] = PLANNED
        self._run_phases(retirement, PLANNED)

    def resume(self, slot: int) -> Ids:
        """Complete the retirement that a dead worker had begun for a slot, if any.

        Returns: the emptied raw pages
        """
        moving, at = self.moving, np.array([slot], np.int32)
        phase = int(moving.phase[slot])
        if phase == 0:
            return NO_PAGES
        retirement = RetirementPlan(at, Retirement(moving.plan[:, at]))
        return self._run_phases(retirement, phase)[0]

    def _run_phases(self, retirement: RetirementPlan, phase: int) -> Ids:
        """Downgrade first, since the tokens of the page take the places of downgraded tokens."""
        moving, slots = self.moving, retirement.slots
        if phase <= PLANNED:
            self._downgrade(retirement)
            moving.phase[slots] = DOWNGRADED
        if phase <= DOWNGRADED:
            self._encode(retirement)
            moving.phase[slots] = ENCODED
        return self._commit(retirement)

    def _downgrade(self, retirement: RetirementPlan) -> None:
        if self.low is not None:
            downgraded = self._put(retirement.plan.downgraded)
            self._move(retirement.slots, HIGH, downgraded, LOW, retirement.plan.downgraded_places)

    def _encode(self, retirement: RetirementPlan) -> None:
        page = self._page_places[len(retirement.slots)]
        self._move(retirement.slots, RAW, page, HIGH, retirement.plan.places)

    def _move(
        self, slots: Ids, source: int, places: Tensor, target: int, target_places: Ids
    ) -> None:
        """Re-encode tokens of some rows of one table in pages of another."""
        memory, sections = self.memory, self.sections
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
        memory.save(table.pages_at(slots, target_places) if memory.is_copied else NO_PAGES)

    def _put(self, places: Ids) -> Tensor:
        """Places by layer and request as rows of sections that span all layers."""
        return self.memory.device.put(places.reshape(-1, *places.shape[2:]))

    def _commit(self, retirement: RetirementPlan) -> Ids:
        """Set tables and counts to the state after the retirement.

        Returns: the emptied raw pages, [requests, head rows]
        """
        moving, slots, raw = self.moving, retirement.slots, self.raw
        emptied = block_table_ops.move_page_to_end(
            raw.pages,
            raw.tokens,
            moving.raw_pages,
            slots,
            self.plan.sink_pages,
            raw.layout.pages(self._full_tokens) - 1,
            raw.layout.tokens,
            self.class_tokens,
            retirement.plan.counts,
        )
        moving.retired[slots] = moving.retired_after[slots]
        moving.phase[slots] = 0
        return emptied
