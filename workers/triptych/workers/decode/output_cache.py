# torch.from_numpy and numpy's comparisons lack types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""What was answered, kept for the next turn: read back from the decode worker's own pages."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from triptych.core.messages import Prefix, Request, pack_tokens
from triptych.core.pages import PagePlan
from triptych.kernels import transcode
from triptych.kernels.pages import segments
from triptych.workers.kv.block_table import Mask, SectionTable
from triptych.workers.kv.device_pages import DevicePages
from triptych.workers.kv.prefix_cache import Ids, PageSlots, PendingPublication, PrefixStore

KeepAnswers = Literal["always", "sessions", "never"]


@dataclass(frozen=True)
class SlotTokenSource:
    """Some tokens of one slot, wherever the tables have them: in 16 bits, high or low.

    A token lies in a page of another class in each head row, and in any order, so each is found by
    its position. It comes out in the high format, but no better than it went in.
    """

    memory: DevicePages
    plan: PagePlan
    tables: Sequence[SectionTable]
    sink: Ids
    stored: int
    """Tokens of the sequence that have keys and values."""
    first: int
    """The first token that is here; each array ends with the last one, [head rows, tokens]."""
    table: Ids
    """Which table has it."""
    page: Ids
    row: Ids
    fixed: int
    """The place of the table of cached prefixes; negative: there is none."""

    @classmethod
    def of(
        cls,
        memory: DevicePages,
        plan: PagePlan,
        tables: Sequence[SectionTable],
        slot: int,
        span: tuple[int, int],
        stored: int,
    ) -> "SlotTokenSource | None":
        """The tokens of a slot in ``span``; None if a head row has dropped a token, of any place.

        What came behind a token that was dropped was computed without it, so it fits this
        request alone.
        """
        rows = plan.geometry.head_rows
        first, end = span
        if np.any(sum(table.tokens[:, slot] for table in tables) != stored):
            return None
        found = np.full((3, rows, end - first), -1, np.int32)
        for index, table in enumerate(tables):
            pages = table.pages[:, slot].reshape(rows, -1)
            counts, each = table.tokens[:, slot].reshape(rows), table.layout.tokens
            pages = pages[:, : table.layout.pages(int(counts.max()))]
            cells: Ids = np.arange(pages.shape[1] * each, dtype=np.int32)
            live: Mask = np.less(cells, counts[:, None])
            ids = memory.device.put(np.where(live[:, ::each], pages, 0)).long()
            kept = segments(memory.near, table.layout).positions[ids]
            positions = kept.cpu().numpy().reshape(rows, -1)
            head, cell = np.nonzero(live & (positions >= first) & (positions < end))
            token = positions[head, cell] - first
            column, row = np.divmod(cell, each)
            found[0, head, token] = index
            found[1, head, token] = pages[head, column]
            found[2, head, token] = row
        if np.any(found < 0):
            return None
        sink = tables[0].pages[:, slot].reshape(rows, -1)[:, : plan.sink_pages]
        fixed = len(tables) - 1 if plan.shares else -1
        return cls(memory, plan, tables, sink.copy(), stored, first, *found, fixed=fixed)

    def copy(self, start: int, count: int, target: PageSlots) -> Tensor | None:
        """Write tokens into cells of high pages; what ``TokenSource`` says."""
        put, part = self.memory.device.put, slice(start - self.first, start - self.first + count)
        table, page, row = (
            part_.ravel() for part_ in (self.table[:, part], self.page[:, part], self.row[:, part])
        )
        for index, one in enumerate(self.tables):
            mine = np.flatnonzero(table == index)
            if mine.size:
                source = put(page[mine]), put(row[mine])
                chosen = put(mine)
                into = target[0][chosen], target[1][chosen]
                transcode(self.memory.near, one.layout, self.plan.high, *source, *into)
        if not self.plan.policy.needs_significance:
            return None
        # A score is the attention that a token received from all that came since, itself included;
        # in a cached prefix it is the mean.
        kept = segments(self.memory.near, self.plan.high).scores
        scores = kept[target[0].long(), target[1].long()]
        seen_by = put(self.stored - np.arange(start, start + count, dtype=np.float32))
        is_mean = put(self.table[:, part] == self.fixed)
        return scores.view(-1, count) / torch.where(is_mean, 1.0, seen_by)


@dataclass(frozen=True)
class FinishedOutput:
    """A finished answer whose pages are still there."""

    request: Request
    output_tokens: Sequence[int]
    """All its tokens."""
    slot: int
    stored: int
    """Tokens of prompt and answer that have keys and values: all but the last."""
    token_s: float
    """Seconds that a token of the prompt took to compute."""


@dataclass
class OutputCache:
    """Gives the pool the ends of sequences that it lacks, a block at a time.

    So a step of decoding, which others wait for, is longer by one block at most.
    """

    store: PrefixStore
    memory: DevicePages
    tables: Sequence[SectionTable]
    mode: KeepAnswers = "always"
    _begun: dict[str, PendingPublication] = field(default_factory=dict[str, PendingPublication])

    @classmethod
    def of(
        cls,
        store: PrefixStore | None,
        memory: DevicePages,
        tables: Sequence[SectionTable],
        mode: KeepAnswers,
    ) -> "OutputCache | None":
        """None if no answer is ever kept.

        A policy that judges tokens by attention that nobody has counted for answers would judge
        them wrong in the next turn.
        """
        if store is None or mode == "never":
            return None
        policy = store.plan.policy
        if policy.needs_significance and not policy.score_every:
            return None
        return cls(store, memory, tables, mode)

    def should_publish(self, request: Request) -> bool:
        """Whether the answer to a request is to be kept."""
        return self.mode == "always" or bool(request.session)

    def publish_next(self, finished: FinishedOutput) -> bool:
        """Keep the next block of an answer; True if nothing is left to be done.

        Until then the pages of its slot must stay as they are.

        Raises: PoolUnavailable, NotRegistered
        """
        name = finished.request.id
        kept = self._begun.get(name) or self._begin(finished)
        if kept is None or self.store.publish_next(kept):
            self.forget(name)
            return True
        self._begun[name] = kept
        return False

    def forget(self, request: str) -> None:
        """Keep no more of an answer."""
        self._begun.pop(request, None)

    def _begin(self, finished: FinishedOutput) -> PendingPublication | None:
        """See what the pool lacks, and where the tokens of it are."""
        request = finished.request
        prefix = Prefix(
            tokens=pack_tokens(
                [*request.prompt, *finished.output_tokens][request.skipped :][: finished.stored]
            ),
            cache_salt=request.cache_salt,
            tenant=request.tenant,
            token_s=finished.token_s,
            session=request.session,
        )
        kept = self.store.begin(prefix)
        if kept is None or kept.first == kept.last:
            return kept
        plan, size = self.store.plan, self.store.plan.block_tokens
        span = kept.first * size, kept.last * size
        kept.source = SlotTokenSource.of(
            self.memory, plan, self.tables, finished.slot, span, finished.stored
        )
        if kept.source is None:
            self.store.skipped["TokensDropped"] += 1
            kept.last = kept.first
        return kept
