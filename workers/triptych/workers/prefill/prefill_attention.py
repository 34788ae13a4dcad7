# pyright: reportUnknownMemberType=false
# Some methods of tensors have no types.
"""Attention of the prefill stage."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.core.layout import PageLayout
from triptych.core.pages import PagePlan
from triptych.kernels import Past, load_tokens, prefill_attention, round_tokens, store_tokens
from triptych.kernels.prefill.reference import Keys, attention_weights, gather_keys
from triptych.kvpool import Arena
from triptych.workers.kv.device_pages import DevicePages
from triptych.workers.models.attention_interface import LayerTraits
from triptych.workers.prefill.prompt_batch import PrefillChunk

Ids = NDArray[np.int32]


class ChunkAttention:
    """Attention of one prefill step: stores new keys and values in raw pages, reads old ones.

    Keys and values are rounded first, to what a later chunk will read: 16 bits, and in whole blocks
    of a prompt what the prefix cache gives back. So an answer depends neither on where chunks begin
    nor on what was cached. The attention that tokens of such blocks receive decides nothing, and is
    added up only for the tokens behind them.
    """

    def __init__(
        self,
        arena: Arena,
        memory: DevicePages,
        plan: PagePlan,
        chunks: list[PrefillChunk],
        positions: NDArray[np.int64],
        *,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """All ``chunks`` have the same layers. ``dtype``: type of the products of attention."""
        self._arena, self._memory, self._dtype = arena, memory, dtype
        self._layout = plan.raw
        self._first_layer = chunks[0].layers.start
        put = memory.device.put
        self._positions = put(positions.astype(np.int32))
        self._sequences = [part for chunk in chunks for part in chunk.sequences()]
        self._offsets = [0, *np.cumsum([part.tokens for part in self._sequences]).tolist()]
        per_page = plan.raw.tokens
        places = [_places(chunk, per_page) for chunk in chunks]
        pages = np.concatenate([pages for pages, _ in places], axis=2)
        self._pages = put(np.ascontiguousarray(pages.transpose(0, 2, 1)))
        layers = max(len(rows) for _, rows in places)
        rows = [np.broadcast_to(rows, (layers, rows.shape[1])) for _, rows in places]
        of_heads = put(np.concatenate(rows, axis=1).astype(np.int32))[:, :, None]
        self._rows = of_heads.expand(-1, -1, plan.geometry.kv_heads).contiguous()
        self._rounded = [(layout, put(mask)) for layout, mask in _rounded_tokens(chunks).items()]
        self._two_way = [part.is_two_way for part in self._sequences]
        self._is_scored = any(part.is_observed for part in self._sequences)
        self._past = _tables_of_past(plan, self._sequences)
        self._past_on_device = None if self._past is None else tuple(map(put, self._past))

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        traits: LayerTraits,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Shapes: query (T, H, D); key, value (T, KH, D) -> (T, H, D)"""
        memory, layer = self._memory.near, layer - self._first_layer
        for high, rounded in self._rounded:
            key, value = round_tokens(high, key, value, rounded)
        store_tokens(
            memory,
            self._layout,
            key,
            value,
            self._pages[layer],
            self._rows[layer % len(self._rows)],
            self._positions,
        )
        past = None
        if self._past is not None and self._past_on_device is not None:
            self._arena.will_need(self._past[0][layer])
            pages, tokens = self._past_on_device
            past = Past(memory, self._layout, pages[layer], tokens[layer % len(tokens)])
        sums = self._empty_sums(query.shape[1]) if self._is_scored else None
        mixed = prefill_attention(
            query.to(self._dtype),
            key.to(self._dtype),
            value.to(self._dtype),
            self._offsets,
            scale=traits.scale,
            window=traits.window,
            softcap=traits.softcap,
            sinks=sinks,
            past=past,
            significance=sums,
            two_way=self._two_way,
        )
        if sums is not None:
            self._add_to_prompts(layer, sums)
        self._add_to_statistics(layer, query.float(), key, value, past, traits, sinks)
        return mixed.to(query.dtype)

    def _add_to_statistics(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        past: Past | None,
        traits: LayerTraits,
        sinks: Tensor | None,
    ) -> None:
        """Add the queries to the statistics of their prompts, where methods need any."""
        for index, (part, first) in enumerate(zip(self._sequences, self._offsets, strict=False)):
            if part.statistics is None:
                continue
            new = slice(first, first + part.tokens)
            keys = partial(gather_keys, load_tokens, key[new], value[new], past, index)
            weights = partial(_weights, query[new], keys, traits, sinks, part.is_two_way)
            part.statistics.add(layer, part.start, query[new], traits, weights)

    def _empty_sums(self, heads: int) -> Tensor:
        longest = max(part.end for part in self._sequences)
        return torch.zeros(len(self._sequences), heads, longest, device=self._memory.device.name)

    def _add_to_prompts(self, layer: int, sums: Tensor) -> None:
        for part, received in zip(self._sequences, sums, strict=True):
            attention, first, end = part.prompt.attention, part.prompt.rounded.stop, part.end
            if part.prompt.bounded is not None:
                end = int(part.prompt.bounded.stored(end)[layer])
            if attention is not None and part.is_observed:
                attention[layer, :, : end - first] += received[:, first:end]


def _weights(
    query: Tensor,
    keys: Callable[[], Keys],
    traits: LayerTraits,
    sinks: Tensor | None,
    two_way: bool,
) -> Tensor:
    """Attention of the queries of a sequence, [H, n, P + n]."""
    return attention_weights(
        query,
        keys(),
        scale=traits.scale,
        window=traits.window,
        softcap=traits.softcap,
        sinks=sinks,
        two_way=two_way,
    )


def _rounded_tokens(chunks: list[PrefillChunk]) -> dict[PageLayout, NDArray[np.bool_]]:
    """Masks of the tokens of a step that are rounded, by the layout to which they are."""
    layouts = dict.fromkeys(chunk.prompt.plan.rounding for chunk in chunks)
    return {
        layout: np.concatenate([_is_rounded(chunk, layout) for chunk in chunks])
        for layout in layouts
    }


def _is_rounded(chunk: PrefillChunk, layout: PageLayout) -> NDArray[np.bool_]:
    prompt, positions = chunk.prompt, chunk.positions
    if prompt.plan.rounding != layout:
        return np.zeros(len(positions), np.bool_)
    return (positions >= prompt.rounded.start) & (positions < prompt.rounded.stop)


def _tables_of_past(plan: PagePlan, chunks: list[PrefillChunk]) -> tuple[Ids, Ids] | None:
    """Page tables [layers, chunks, kv_heads, pages] and tokens [layers, chunks, kv_heads], or
    [1, chunks, kv_heads] if all layers store as many.

    With some layers of a prompt, its pages are of these alone.
    """
    if not any(chunk.start for chunk in chunks):
        return None
    stored = [_stored(chunk) for chunk in chunks]
    geometry, width = plan.geometry, plan.raw.pages(max(int(each.max()) for each in stored))
    layers = len(chunks[0].layers)
    table = np.zeros((layers, len(chunks), geometry.kv_heads, width), np.int32)
    for i, (chunk, each) in enumerate(zip(chunks, stored, strict=True)):
        used = plan.raw.pages(int(each.max()))
        bounded = chunk.prompt.bounded
        pages = chunk.prompt.pages if bounded is None else bounded.table
        table[:, i, :, :used] = pages[:, :, :used]
    kinds = max(len(each) for each in stored)
    tokens = np.stack([np.broadcast_to(each, kinds) for each in stored], axis=1)
    return table, np.repeat(tokens[:, :, None], geometry.kv_heads, axis=2)


def _stored(chunk: PrefillChunk) -> Ids:
    """Tokens of a row before a chunk: [1], or [layers] if these store different ones."""
    bounded = chunk.prompt.bounded
    return np.array([chunk.start], np.int32) if bounded is None else bounded.stored(chunk.start)


def _places(chunk: PrefillChunk, per_page: int) -> tuple[Ids, NDArray[np.int64]]:
    """Where the tokens of a chunk are stored: pages [layers, kv_heads, T], and rows in these,
    [1, T], or [layers, T] if layers store different tokens."""
    prompt, positions = chunk.prompt, chunk.positions
    if prompt.bounded is None:
        return prompt.pages[:, :, positions // per_page], positions[None] % per_page
    slots = prompt.bounded.slots(positions)
    pages = np.take_along_axis(prompt.bounded.table, slots[:, None] // per_page, axis=2)
    return pages, slots % per_page
