"""Attention of a decode step over compressed pages, without decompressing them first."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.kernels import append_tokens, block_table_ops, decode_attention, score_tokens
from triptych.workers.decode.page_selection import Selector, StepChoice
from triptych.workers.kv.block_table import Sections, SectionTable
from triptych.workers.kv.device_pages import DevicePages
from triptych.workers.kv.prefetch import Prefetcher

Ids = NDArray[np.int32]
Ids64 = NDArray[np.int64]


class PageAttention:
    """Attention of one decode step: appends the new token, then attends to the pages of a row.

    Every ``score_every`` tokens of a request, the attention that its tokens receive is added to
    their scores, weighted by ``score_every``. Those steps depend on the position alone, so an
    output does not depend on the rest of the batch. A request of such a step reads all its pages;
    others can read a selection.
    """

    def __init__(
        self,
        memory: DevicePages,
        sections: Sections,
        slots: Ids,
        positions: Ids,
        score_every: int,
        progress: NDArray[np.int64],
        selector: Selector | None = None,
        fixed: SectionTable | None = None,
        prefetcher: Prefetcher | None = None,
    ) -> None:
        """Choose the place of each new token in the first table, and count it as stored.

        ``fixed``: the last of the tables, if there is one. It is read, but its scores do not
        change, since other requests share its pages.

        ``progress``: for each slot the layers whose scores are added, over all positions. A step
        that is repeated after a worker death skips those layers.
        """
        self._memory, self._sections, self._prefetcher = memory, sections, prefetcher
        self._tables = sections.tables[:-1] if fixed is not None else sections.tables
        self._ids, self._progress, self._score_every = slots, progress, score_every
        put, raw = memory.device.put, self._tables[0]
        places, self._scored, self._before, is_begun = block_table_ops.count_new_tokens(
            raw.tokens, slots, raw.room, positions, progress, score_every
        )
        self._begun: Ids64 | None = progress[slots] - self._before if is_begun else None
        sections.renew(slots)
        self._slots, self._positions = put(slots), put(positions)
        self._places = put(places)
        self._choice: StepChoice | None = None
        if selector is not None:
            self._choice = selector.step(slots, positions, self._scored)
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
        sections = self._sections.of_layer[layer]
        due = self._due if self._begun is None else self._part(self._left(self._scored, layer))
        lse = None
        if due is not None:
            lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
        choice = self._choice
        lists = choice.lists(layer, query, scale=scale, window=window) if choice else None
        if self._prefetcher is not None:
            self._prefetcher.layer(layer, self._ids, lists)
        mixed = decode_attention(
            query,
            self._memory.near,
            sections,
            self._slots,
            scale=scale,
            window=window,
            softcap=softcap,
            positions=self._positions,
            lse=lse,
            page_lists=lists,
        )
        if due is not None and lse is not None:
            self._score(layer, due, query, lse, scale=scale, window=window, softcap=softcap)
        return mixed.to(query.dtype)

    def _score(
        self,
        layer: int,
        due: "_Scored",
        query: Tensor,
        lse: Tensor,
        *,
        scale: float,
        window: int,
        softcap: float,
    ) -> None:
        """Add to scores, then record the progress. This part is not idempotent.

        If the worker dies in between, the scores of this layer and step count twice.
        """
        memory = self._memory
        score_tokens(
            query[due.at],
            memory.near,
            self._sections.of_layer[layer][: len(self._tables)],
            due.slots,
            lse[due.at],
            scale=scale,
            window=window,
            softcap=softcap,
            positions=due.positions,
            weight=float(self._score_every),
        )
        if memory.is_copied:
            for table in self._tables:
                memory.save_scores(table.layout, table.pages_of(layer, due.ids))
        memory.device.wait()
        self._progress[due.ids] = due.before + layer + 1

    def _store(self, layer: int, key: Tensor, value: Tensor) -> None:
        slots, places, positions = self._slots, self._places, self._positions
        if self._begun is not None:
            left = self._memory.device.put(self._left(np.arange(len(key)), layer))
            key, value, slots, places = key[left], value[left], slots[left], places[left]
            positions = positions[left]
        raw = self._sections.of_layer[layer][0]
        for arena in self._memory.arenas:
            append_tokens(arena, raw, key, value, slots, places, positions)

    @cached_property
    def _due(self) -> "_Scored | None":
        """Requests to score, the same for each layer of a step that was not cut short."""
        return self._part(self._scored)

    def _part(self, requests: Ids64) -> "_Scored | None":
        """Tensors of some requests to score; None if there are none."""
        if not len(requests):
            return None
        at, ids = self._memory.device.put(requests), self._ids[requests]
        return _Scored(at, ids, self._slots[at], self._positions[at], self._before[requests])

    def _left(self, requests: Ids64, layer: int) -> Ids64:
        """The requests for which this layer is not done yet."""
        return requests if self._begun is None else requests[self._begun[requests] <= layer]


@dataclass(frozen=True, slots=True)
class _Scored:
    """Requests of a step whose tokens are scored."""

    at: Tensor
    """Their indices in the batch."""
    ids: Ids
    """Their slots, on the host, and where the kernels run."""
    slots: Tensor
    positions: Tensor
    before: Ids64
    """Layers whose scores were added before this step."""
