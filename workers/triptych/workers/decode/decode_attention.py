"""Attention of a decode step over compressed pages, without decompressing them first."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.kernels import (
    Section,
    append_tokens,
    attend_rotated,
    decode_attention,
    record_scores,
    rotate_back,
    score_tokens,
)
from triptych.workers.decode.page_selection import StepChoice
from triptych.workers.device import Device
from triptych.workers.kv.block_table import Sections
from triptych.workers.kv.device_pages import DevicePages
from triptych.workers.kv.new_tokens import NewTokens
from triptych.workers.kv.prefetch import Prefetcher
from triptych.workers.models.attention_interface import LayerTraits

Ids = NDArray[np.int32]
Ids64 = NDArray[np.int64]


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
        num_fixed: int,
        score_every: int,
        progress: Tensor,
    ) -> None:
        """``num_fixed``: number of fixed tables, the last ones. They are read, but their scores do
        not change, since other requests share their pages. ``score_every``: weight of the scores;
        0: no method scores tokens. ``progress``: for each slot the layers whose scores are added,
        over all positions, int64 [slots], on the device; shared memory.
        """
        last = -num_fixed or None
        self._memory, self.weight = memory, float(score_every)
        self.of_layer: Sequence[Sequence[Section]] = [each[:last] for each in sections.of_layer]
        """Sections of each layer whose scores change."""
        self.progress = progress

    @property
    def are_kept(self) -> bool:
        """Whether the policy scores tokens while it generates."""
        return self.weight > 0

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
            self.of_layer[layer],
            slots,
            lse,
            scale=traits.scale,
            window=traits.window,
            softcap=traits.softcap,
            positions=positions,
            weight=self.weight,
            mirror=memory.mirror,
        )
        record_scores(self.progress, slots, positions, layer, len(self.of_layer))


class PlainAttention:
    """Attention of a step that stores tokens and attends to all pages of a row.

    All that it does is queued on the device: nothing is put there, and nothing is read back.
    """

    def __init__(
        self,
        memory: DevicePages,
        sections: Sections,
        placed: Placed,
        stores: Sequence[Tensor],
        scores: TokenScores | None,
        scored: Tensor,
    ) -> None:
        """``stores``: for each of the first sections, which get new tokens, the slots of the
        requests that store them there, int32 (B,); -1 for others. ``scores``: None: no token is
        scored. ``scored``: slots of the requests whose tokens are scored; -1 for others.
        """
        self._memory, self._sections, self._placed = memory, sections, placed
        self._stores, self._scores, self._scored = stores, scores, scored

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
        placed = self._placed
        lse = self._store(layer, query, key, value, sinks)
        mixed = decode_attention(
            query,
            self._memory.near,
            self._sections.of_layer[layer],
            placed.slots,
            scale=traits.scale,
            window=traits.window,
            softcap=traits.softcap,
            positions=placed.positions,
            lse=lse,
        )
        if sinks is not None and lse is not None:
            _add_sinks(sinks, mixed, lse)
        self._score(layer, query, lse, traits)
        return mixed.to(query.dtype)

    def rotated_back(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        traits: LayerTraits,
        sinks: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        """See ``RotatingAttend``: the kernel that merges runs of pages rotates, too."""
        if sinks is not None:  # they are added before
            return rotate_back(self(layer, query, key, value, traits, sinks), dtype)
        placed = self._placed
        lse = self._store(layer, query, key, value, sinks)
        mixed = attend_rotated(
            query,
            self._memory.near,
            self._sections.of_layer[layer],
            placed.slots,
            dtype,
            scale=traits.scale,
            window=traits.window,
            softcap=traits.softcap,
            positions=placed.positions,
            lse=lse,
        )
        self._score(layer, query, lse, traits)
        return mixed

    def _store(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> Tensor | None:
        """Store the new tokens of a layer; returns memory for log-sum-exps if they are needed."""
        memory, placed = self._memory, self._placed
        for section, slots in zip(self._sections.of_layer[layer], self._stores, strict=False):
            where = slots, placed.places, placed.positions
            append_tokens(memory.near, section, key, value, *where, mirror=memory.mirror)
        return _empty_lse(query) if self._scores is not None or sinks is not None else None

    def _score(self, layer: int, query: Tensor, lse: Tensor | None, traits: LayerTraits) -> None:
        if self._scores is not None and lse is not None:
            self._scores.add(layer, query, lse, self._scored, self._placed.positions, traits)


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
        sections = self._sections.of_layer[layer]
        near, mirror = self._memory.near, self._memory.mirror
        for section, at, placed in self._stores_in(layer):
            some = (key, value) if at is None else (key[at], value[at])
            where = placed.slots, placed.places, placed.positions
            append_tokens(near, sections[section], *some, *where, mirror=mirror)

    def _stores_in(self, layer: int) -> "Sequence[_Stored]":
        """The new tokens that a layer stores, by section."""
        if self._new.begun is None:
            return self._stores
        every = np.arange(len(self._new.slots))
        return [
            self._stored(section, self._left(every if at is None else at, layer))
            for section, at in self._new.stores
        ]

    @cached_property
    def _stores(self) -> "Sequence[_Stored]":
        """The same for each layer of a step that was not cut short."""
        return [self._stored(section, at) for section, at in self._new.stores]

    def _stored(self, section: int, requests: Ids64 | None) -> "_Stored":
        placed = self._placed
        if requests is None:
            return _Stored(section, None, placed)
        at = self._memory.device.put(requests)
        some = Placed(placed.slots[at], placed.positions[at], placed.places[at])
        return _Stored(section, at, some)

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


class _Stored(NamedTuple):
    """New tokens of a step that go to one section."""

    section: int
    at: Tensor | None
    """Indices of their requests in the batch; None: all."""
    placed: Placed


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
