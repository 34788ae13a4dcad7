# torch.from_numpy and numpy's comparisons lack types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Publishes finished outputs to the prefix cache, read from the decode worker's own pages."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from triptych.core.images import content_keys
from triptych.core.layout import PageLayout
from triptych.core.messages import Prefix, Request, pack_tokens
from triptych.core.pages import PagePlan
from triptych.kernels import transcode
from triptych.kernels.pages import segments
from triptych.workers.kv.block_table import Mask, SectionTable
from triptych.workers.kv.device_pages import DevicePages
from triptych.workers.kv.method_tables import MethodTables
from triptych.workers.kv.prefix_cache import (
    Ids,
    PageSlots,
    PendingPublication,
    PrefixStore,
    page_slots_of,
)

KeepAnswers = Literal["always", "sessions", "never"]


@dataclass(frozen=True)
class SlotTokenSource:
    """Tokens of one slot as a ``TokenSource``: from recent, high and low pages.

    A token can be in a page of a different class in each head row, in any order, so it is found by
    its position. A copy has the high format, without regaining precision that was lost.
    """

    memory: DevicePages
    plan: PagePlan
    tables: Sequence[SectionTable]
    stored: int
    """Tokens of the sequence that have keys and values."""
    first: int
    """Position of the first token of the arrays, [head rows, tokens]."""
    table: Ids
    """Index of the table that has each token."""
    page: Ids
    row: Ids
    fixed: int
    """Index of the table of cached prefixes; negative: there is none."""

    @classmethod
    def of(
        cls,
        memory: DevicePages,
        method: MethodTables,
        slot: int,
        span: range,
        in_windows: range,
        stored: int,
    ) -> "SlotTokenSource | None":
        """The tokens of a slot in ``span``; None if a head row has dropped any token.

        None too if one of them is in a page without positions.

        Tokens behind a dropped one were computed without it, so other requests cannot use them.
        Those that a layer with a sliding window dropped because no later token reads them do not
        count, unless they are among ``in_windows``, which are wanted of these layers.
        """
        plan, tables = method.plan, method.sections
        rows = plan.geometry.head_rows
        first, end = min(span.start, in_windows.start), max(span.stop, in_windows.stop)
        keeps_all = np.array(plan.windows) == 0
        complete = np.flatnonzero(keeps_all | plan.policy.drops_tokens)
        if np.any(sum(table.tokens[complete, slot] for table in tables) != stored):
            return None
        found = np.full((3, rows, end - first), -1, np.int32)
        for index, table in enumerate(tables):
            pages = table.pages[:, slot].reshape(rows, -1)
            if not table.layout.is_tracked:
                continue
            counts, each = table.tokens[:, slot].reshape(rows), table.layout.tokens
            pages = pages[:, : table.layout.pages(int(counts.max()))]
            places: Ids = np.arange(pages.shape[1] * each, dtype=np.int32)
            live: Mask = np.less(places, counts[:, None])
            ids = memory.device.put(np.where(live[:, ::each], pages, 0)).long()
            kept = segments(memory.near, table.layout).positions[ids]
            positions = kept.cpu().numpy().reshape(rows, -1)
            head, place = np.nonzero(live & (positions >= first) & (positions < end))
            token = positions[head, place] - first
            column, row = np.divmod(place, each)
            found[0, head, token] = index
            found[1, head, token] = pages[head, column]
            found[2, head, token] = row
        wanted = np.zeros((rows, end - first), np.bool_)
        is_full = np.repeat(keeps_all, plan.geometry.kv_heads)
        wanted[is_full, span.start - first : span.stop - first] = True
        wanted[~is_full, in_windows.start - first : in_windows.stop - first] = True
        if np.any(found[0][wanted] < 0):
            return None
        fixed = -1 if method.fixed is None else len(tables) - 1
        return cls(memory, plan, tables, stored, first, *found, fixed=fixed)

    def copy_sink(self, rows: Ids, target: Ids) -> None:
        """Fill raw pages with the first tokens, as ``TokenSource`` describes."""
        raw, put = self.plan.raw, self.memory.device.put
        page, row = page_slots_of(target, raw.tokens, 0, target.shape[1] * raw.tokens)
        self._copy(rows, 0, target.shape[1] * raw.tokens, raw, (put(page), put(row)))

    def copy(self, rows: Ids, start: int, count: int, target: PageSlots) -> Tensor | None:
        """Write tokens into slots of high pages, as ``TokenSource`` describes."""
        self._copy(rows, start, count, self.plan.high, target)
        put, part = self.memory.device.put, slice(start - self.first, start - self.first + count)
        if not self.plan.policy.needs_significance:
            return None
        # A score is the sum of the attention from the token itself and all later ones;
        # in a cached prefix it is the mean.
        kept = segments(self.memory.near, self.plan.high).scores
        scores = kept[target[0].long(), target[1].long()]
        seen_by = put(self.stored - np.arange(start, start + count, dtype=np.float32))
        is_mean = put(self.table[rows, part] == self.fixed)
        return scores.view(-1, count) / torch.where(is_mean, 1.0, seen_by)

    def _copy(
        self, rows: Ids, start: int, count: int, layout: PageLayout, target: PageSlots
    ) -> None:
        """Write ``count`` tokens from ``start`` on into slots of pages of a layout."""
        put, part = self.memory.device.put, slice(start - self.first, start - self.first + count)
        table, page, row = (
            part_[rows, part].ravel() for part_ in (self.table, self.page, self.row)
        )
        for index, one in enumerate(self.tables):
            mine = np.flatnonzero(table == index)
            if mine.size:
                source = put(page[mine]), put(row[mine])
                chosen = put(mine)
                into = target[0][chosen], target[1][chosen]
                transcode(self.memory.near, one.layout, layout, *source, *into)


@dataclass(frozen=True)
class FinishedOutput:
    """A finished output whose request still has its pages."""

    request: Request
    output_tokens: Sequence[int]
    """All output tokens."""
    slot: int
    tables: MethodTables
    """The tables of its compression method."""
    stored: int
    """Tokens of prompt and output that have keys and values: all but the last."""
    token_s: float
    """Prefill time per prompt token in seconds."""


@dataclass
class OutputCache:
    """Publishes finished sequences to the prefix cache, one block at a time.

    Publishing delays a decode step by one block at most.
    """

    store: PrefixStore
    memory: DevicePages
    mode: KeepAnswers = "always"
    _begun: dict[str, PendingPublication] = field(default_factory=dict[str, PendingPublication])

    @classmethod
    def of(
        cls,
        store: PrefixStore | None,
        memory: DevicePages,
        mode: KeepAnswers,
    ) -> "OutputCache | None":
        """None if no output is published."""
        return None if store is None or mode == "never" else cls(store, memory, mode)

    def should_publish(self, request: Request) -> bool:
        """Whether the output of a request is published."""
        plan = self.store.plan.of_method(request.method)
        return plan.publishes_answers and (self.mode == "always" or bool(request.session))

    def keeps_high(self, request: Request) -> bool:
        """Whether no token may be downgraded while the output of a request is generated.

        It will be published, and its low tokens would not be found, since they have no positions.
        """
        low = self.store.plan.of_method(request.method).low
        return low is not None and not low.is_tracked and self.should_publish(request)

    def publish_next(self, finished: FinishedOutput) -> bool:
        """Publish the next block of an output; True if none is left.

        Until then the pages of its slot must not change.

        Raises: PoolUnavailable, NotRegistered
        """
        name = finished.request.id
        store = self.store.of_method(finished.request.method)
        kept = self._begun.get(name) or self._begin(store, finished)
        if kept is None or store.publish_next(kept):
            self.forget(name)
            return True
        self._begun[name] = kept
        return False

    def forget(self, request: str) -> None:
        """Stop publishing an output."""
        self._begun.pop(request, None)

    def _begin(self, store: PrefixStore, finished: FinishedOutput) -> PendingPublication | None:
        """Find the blocks that the pool lacks, and the places of their tokens."""
        request = finished.request
        tokens = [*request.prompt, *finished.output_tokens][request.skipped :]
        prefix = Prefix(
            tokens=pack_tokens(content_keys(tokens[: finished.stored], request.images)),
            cache_salt=request.cache_salt,
            tenant=request.tenant,
            token_s=finished.token_s,
            session=request.session,
        )
        size = store.plan.block_tokens
        first_window = max(0, finished.stored // size - store.plan.window_blocks)
        kept = store.begin(prefix, first_window)
        if kept is None or kept.is_done:
            return kept
        span = range(kept.first * size, kept.last * size)
        in_windows = range(min([*kept.windows, kept.last]) * size, kept.last * size)
        kept.source = SlotTokenSource.of(
            self.memory, finished.tables, finished.slot, span, in_windows, finished.stored
        )
        if kept.source is None:
            store.skipped["TokensDropped"] += 1
            kept.give_up()
        return kept
