"""Attention of a decode step over compressed pages, without decompressing them first."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.kernels import (
    Section,
    append_tokens,
    block_table_ops,
    decode_attention,
    record_scores,
    score_tokens,
)
from triptych.workers.decode.page_selection import StepChoice
from triptych.workers.device import Device
from triptych.workers.kv.block_table import Sections, SectionTable
from triptych.workers.kv.device_pages import DevicePages
from triptych.workers.kv.prefetch import Prefetcher
from triptych.workers.models.attention_interface import LayerTraits

Ids = NDArray[np.int32]
Ids64 = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class NewTokens:
    """Places of the new tokens of a step, and the requests whose tokens are scored in it.

    Every ``score_every`` tokens of a request its tokens are scored. Those steps depend on the
    position alone, so an output does not depend on the rest of the batch.
    """

    slots: Ids
    positions: Ids
    places: Ids
    """Indices of the tokens in their rows of the first table."""
    scored: Ids64
    """Indices of the requests whose tokens are scored."""
    begun: Ids64 | None
    """Layers of this step whose scores are added; None: 0, as the step was not cut short."""

    @classmethod
    def count(
        cls,
        raw: SectionTable,
        slots: Ids,
        positions: Ids,
        score_every: int,
        progress: NDArray[np.int64],
    ) -> "NewTokens":
        """Choose the place of each new token in the first table, and count it as stored.

        ``progress``: for each slot the layers whose scores are added, over all positions. A step
        that is repeated after a worker death skips those layers.
        """
        places, scored, before, is_begun = block_table_ops.count_new_tokens(
            raw.tokens, slots, raw.room, positions, progress, score_every
        )
        begun = progress[slots] - before if is_begun else None
        return cls(slots, positions, places, scored, begun)


@dataclass(frozen=True, slots=True)
class Placed:
    """Slots, positions and places of new tokens where the kernels run, each int32 (B,)."""

    slots: Tensor
    positions: Tensor
    places: Tensor

    @classmethod
    def put(cls, new: NewTokens, device: Device) -> "Placed":
        return cls(device.put(new.slots), device.put(new.positions), device.put(new.places))


class TokenScores:
    """The scores of an engine's tokens, and the record of those that are added.

    Scores are added layer by layer, and a worker can die after any of them. The takeover worker
    repeats the step without the layers that the checkpoint has recorded. On a GPU a kernel writes
    the record, into memory of the host, after the kernels that add scores: so the host does not
    wait for a layer, and the record does not depend on whether the host still lives.
    """

    def __init__(
        self,
        memory: DevicePages,
        sections: Sections,
        fixed: SectionTable | None,
        score_every: int,
        progress: NDArray[np.int64],
    ) -> None:
        """``fixed``: the last of the tables, if there is one. It is read, but its scores do not
        change, since other requests share its pages. ``score_every``: weight of the scores.
        ``progress``: for each slot the layers whose scores are added, over all positions; shared
        memory.
        """
        last = None if fixed is None else -1
        self._memory, self._weight = memory, float(score_every)
        self._of_layer: Sequence[Sequence[Section]] = [each[:last] for each in sections.of_layer]
        shared = memory.device.share(progress.view(np.uint8))
        self._progress = shared.view(torch.int64)

    @property
    def are_kept(self) -> bool:
        """Whether the policy scores tokens while it generates."""
        return self._weight > 0

    def add(
        self,
        layer: int,
        query: Tensor,
        lse: Tensor,
        slots: Tensor,
        positions: Tensor,
        traits: LayerTraits,
    ) -> None:
        """Add to the scores of a layer, then record it. This part is not idempotent.

        If the worker dies in between, the scores of this layer and step count twice. On a GPU rows
        with slot -1 are skipped.

        Shapes: query (B, H, D); lse (B, H); slots, positions (B,) int32
        """
        memory = self._memory
        score_tokens(
            query,
            memory.near,
            self._of_layer[layer],
            slots,
            lse,
            scale=traits.scale,
            window=traits.window,
            softcap=traits.softcap,
            positions=positions,
            weight=self._weight,
            mirror=memory.mirror,
        )
        record_scores(self._progress, slots, positions, layer, len(self._of_layer))


class PlainAttention:
    """Attention of a step that stores tokens and attends to all pages of a row.

    All that it does is queued on the device: nothing is put there, and nothing is read back.
    """

    def __init__(
        self,
        memory: DevicePages,
        sections: Sections,
        placed: Placed,
        scores: TokenScores | None,
        scored: Tensor,
    ) -> None:
        """``scores``: None: no token is scored. ``scored``: slots of the requests whose tokens are
        scored, int32 (B,); -1 for others.
        """
        self._memory, self._sections, self._placed = memory, sections, placed
        self._scores, self._scored = scores, scored

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        traits: LayerTraits,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Shapes: query (B, H, D); key, value (B, KH, D) -> (B, H, D)"""
        sections, placed = self._sections.of_layer[layer], self._placed
        where = placed.slots, placed.places, placed.positions
        memory, scores = self._memory, self._scores
        append_tokens(memory.near, sections[0], key, value, *where, mirror=memory.mirror)
        lse = _empty_lse(query) if scores is not None or sinks is not None else None
        mixed = decode_attention(
            query,
            memory.near,
            sections,
            placed.slots,
            scale=traits.scale,
            window=traits.window,
            softcap=traits.softcap,
            positions=placed.positions,
            lse=lse,
        )
        if sinks is not None and lse is not None:
            _add_sinks(sinks, mixed, lse)
        if scores is not None and lse is not None:
            scores.add(layer, query, lse, self._scored, placed.positions, traits)
        return mixed.to(query.dtype)


class PageAttention:
    """Attention of one decode step: appends the new token, then attends to the pages of a row.

    Where tokens are scored, the attention that they receive is added to their scores. A request
    that is scored reads all its pages; others can read a selection.
    """

    def __init__(
        self,
        memory: DevicePages,
        sections: Sections,
        new: NewTokens,
        scores: TokenScores,
        choice: StepChoice | None = None,
        prefetcher: Prefetcher | None = None,
    ) -> None:
        """``choice``: None: all pages are read."""
        self._memory, self._sections, self._prefetcher = memory, sections, prefetcher
        self._new, self._scores = new, scores
        self._placed, self._choice = Placed.put(new, memory.device), choice
        if prefetcher is not None:
            prefetcher.begin_step()

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        traits: LayerTraits,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Shapes: query (B, H, D); key, value (B, KH, D) -> (B, H, D)"""
        self._store(layer, key, value)
        sections = self._sections.of_layer[layer]
        due = self._due_in(layer)
        lse = _empty_lse(query) if due is not None or sinks is not None else None
        choice = self._choice
        lists = (
            choice.lists(layer, query, scale=traits.scale, window=traits.window) if choice else None
        )
        if self._prefetcher is not None:
            self._prefetcher.layer(layer, self._new.slots, lists)
        mixed = decode_attention(
            query,
            self._memory.near,
            sections,
            self._placed.slots,
            scale=traits.scale,
            window=traits.window,
            softcap=traits.softcap,
            positions=self._placed.positions,
            lse=lse,
            page_lists=lists,
        )
        if sinks is not None and lse is not None:
            _add_sinks(sinks, mixed, lse)
        if due is not None and lse is not None:
            at, slots, positions = due.at, due.slots, due.positions
            self._scores.add(layer, query[at], lse[at], slots, positions, traits)
        return mixed.to(query.dtype)

    def _store(self, layer: int, key: Tensor, value: Tensor) -> None:
        placed = self._placed
        slots, places, positions = placed.slots, placed.places, placed.positions
        if self._new.begun is not None:
            left = self._memory.device.put(self._left(np.arange(len(key)), layer))
            key, value, slots, places = key[left], value[left], slots[left], places[left]
            positions = positions[left]
        raw = self._sections.of_layer[layer][0]
        near, mirror = self._memory.near, self._memory.mirror
        append_tokens(near, raw, key, value, slots, places, positions, mirror=mirror)

    def _due_in(self, layer: int) -> "_Scored | None":
        """Requests to score in a layer."""
        if self._new.begun is None:
            return self._due
        return self._part(self._left(self._new.scored, layer))

    @cached_property
    def _due(self) -> "_Scored | None":
        """Requests to score, the same for each layer of a step that was not cut short."""
        return self._part(self._new.scored)

    def _part(self, requests: Ids64) -> "_Scored | None":
        """Tensors of some requests to score; None if there are none."""
        if not len(requests):
            return None
        at, placed = self._memory.device.put(requests), self._placed
        return _Scored(at, placed.slots[at], placed.positions[at])

    def _left(self, requests: Ids64, layer: int) -> Ids64:
        """The requests for which this layer is not done yet."""
        begun = self._new.begun
        return requests if begun is None else requests[begun[requests] <= layer]


@dataclass(frozen=True, slots=True)
class _Scored:
    """Requests of a step whose tokens are scored."""

    at: Tensor
    """Their indices in the batch."""
    slots: Tensor
    positions: Tensor


def _empty_lse(query: Tensor) -> Tensor:
    return torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)


def _add_sinks(sinks: Tensor, mixed: Tensor, lse: Tensor) -> None:
    """Add a logit without a value to the softmax of each head, in place.

    Shapes: sinks (H,); mixed (B, H, D); lse (B, H)
    """
    mixed *= torch.sigmoid(lse - sinks)[..., None]
    torch.logaddexp(lse, sinks, out=lse)
