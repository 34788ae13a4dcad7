# pyright: reportUnknownMemberType=false
# torch.from_numpy has no type hints.
"""The attention of a decode step, over pages as they are."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.kernels import decode_attention, score_tokens, store_tokens
from triptych.workers.prefetch import Prefetcher
from triptych.workers.rows import Mask, SectionTable
from triptych.workers.selection import Selector, StepChoice

Ids = NDArray[np.int32]


class PageAttention:
    """Attention of one decode step: appends the new token, then reads all pages as they are.

    Every so many tokens of a request, the attention that its tokens receive is added to their
    scores, times the tokens that it stands for. Which steps those are depends on the position
    alone, so an answer does not depend on what else is in the batch. Requests of such a step read
    all their pages; others may read a choice of them.
    """

    def __init__(
        self,
        arena: Tensor,
        tables: Sequence[SectionTable],
        slots: Ids,
        positions: Tensor,
        score_every: int,
        progress: NDArray[np.int64],
        selector: Selector | None = None,
        fixed: SectionTable | None = None,
        prefetcher: Prefetcher | None = None,
    ) -> None:
        """Choose the cell of each new token in the first table, and count it as stored.

        ``fixed`` is read as well, but what its tokens receive is added to no score: other requests
        read the same pages.

        ``progress`` has, for each slot, the layers whose scores are added, over all positions. A
        step that is done again, as its worker died, leaves those layers as they are.
        """
        self._arena, self._tables = arena, tables
        self._sections = [*tables, fixed] if fixed is not None else tables
        self._ids, self._prefetcher = slots, prefetcher
        self._slots, self._positions = torch.from_numpy(slots), positions.int()
        self._score_every, self._progress = score_every, torch.from_numpy(progress)
        now = positions.numpy()
        is_scored: Mask = now % score_every == 0 if score_every else np.zeros(len(now), np.bool_)
        self._scored = torch.from_numpy(np.flatnonzero(is_scored))
        before, done = now * len(tables[0].pages), progress[slots]
        self._before = torch.from_numpy(before)
        self._begun = torch.from_numpy(done - before) if (done > before).any() else None
        pages, rows = tables[0].next_cells(slots)
        self._pages, self._rows = torch.from_numpy(pages), torch.from_numpy(rows)
        tables[0].tokens[:, slots] += 1
        self._choice: StepChoice | None = None
        if selector is not None:
            self._choice = selector.step(slots, positions, is_scored)
        if prefetcher is not None:
            prefetcher.begin_step()

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int,
        softcap: float,
    ) -> Tensor:
        """Shapes: query (B, H, D); key, value (B, KH, D) -> (B, H, D)"""
        self._store(layer, key, value)
        sections = [table.section(layer) for table in self._sections]
        scored = self._left(self._scored, layer)
        lse = torch.empty(query.shape[:2]) if len(scored) else None
        choice = self._choice
        lists = choice.lists(layer, query, scale=scale, window=window) if choice else None
        if self._prefetcher is not None:
            self._prefetcher.layer(layer, self._ids, lists)
        mixed = decode_attention(
            query,
            self._arena,
            sections,
            self._slots,
            scale=scale,
            window=window,
            softcap=softcap,
            positions=self._positions,
            lse=lse,
            lists=lists,
        )
        if lse is not None:
            self._score(layer, scored, query, lse, scale=scale, window=window, softcap=softcap)
        return mixed.to(query.dtype)

    def _score(
        self,
        layer: int,
        scored: Tensor,
        query: Tensor,
        lse: Tensor,
        *,
        scale: float,
        window: int,
        softcap: float,
    ) -> None:
        """Add to scores, then note it: the one thing that cannot be done twice, or in halves.

        A worker that dies in between has this layer's scores of this step count twice.
        """
        score_tokens(
            query[scored],
            self._arena,
            [table.section(layer) for table in self._tables],
            self._slots[scored],
            lse[scored],
            scale=scale,
            window=window,
            softcap=softcap,
            positions=self._positions[scored],
            weight=float(self._score_every),
        )
        self._progress[self._slots[scored]] = self._before[scored] + layer + 1

    def _store(self, layer: int, key: Tensor, value: Tensor) -> None:
        pages, rows, positions = self._pages[layer], self._rows[layer], self._positions
        if self._begun is not None:
            left = self._left(torch.arange(len(key)), layer)
            key, value, pages, rows = key[left], value[left], pages[left], rows[left]
            positions = positions[left]
        store_tokens(self._arena, self._tables[0].layout, key, value, pages, rows, positions)

    def _left(self, requests: Tensor, layer: int) -> Tensor:
        """Those of the requests for which this layer is still to be done."""
        return requests if self._begun is None else requests[self._begun[requests] <= layer]
