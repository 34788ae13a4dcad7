# torch.from_numpy and numpy's comparisons lack types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Page tables of the decode stage: which pages hold which head row's tokens.

A head row is one (slot, layer, KV head); a slot is one request. Tables of all layers lie in
one array, so that a step plans the pages of every head row at once.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from triptych.core.layout import Geometry, PageLayout
from triptych.kernels import Section

Ids = NDArray[np.int32]
Mask = NDArray[np.bool_]


@dataclass(eq=False)
class SectionTable:
    """Pages of one format of all head rows: a dense, growing list per row."""

    layout: PageLayout
    pages: Ids
    """Page ids, [layers, slots, kv_heads, pages of a row]; cells past the end hold 0."""
    tokens: Ids
    """Tokens stored, [layers, slots, kv_heads]."""

    @classmethod
    def empty(
        cls, layout: PageLayout, geometry: Geometry, slots: int, width: int
    ) -> "SectionTable":
        shape = (geometry.layers, slots, geometry.kv_heads)
        return cls(layout, np.zeros((*shape, width), np.int32), np.zeros(shape, np.int32))

    def __post_init__(self) -> None:
        self._sections = [
            Section(self.layout, torch.from_numpy(pages), torch.from_numpy(tokens))
            for pages, tokens in zip(self.pages, self.tokens, strict=True)
        ]

    def section(self, layer: int) -> Section:
        """What the attention kernel reads: a view, so it always shows the present state."""
        return self._sections[layer]

    def fill(self, slot: int, tokens: Ids, ids: Ids) -> None:
        """Set a slot's rows from a handle: tokens [head rows], page ids in row order."""
        layers, _, kv_heads, width = self.pages.shape
        counts = -(-tokens // self.layout.tokens)
        used: Mask = np.arange(width) < counts[:, None]
        table = np.zeros((len(tokens), width), np.int32)
        table[used] = ids
        self.pages[:, slot] = table.reshape(layers, kv_heads, width)
        self.tokens[:, slot] = tokens.reshape(layers, kv_heads)

    def ids(self, slot: int) -> Ids:
        """Every page of a slot."""
        counts = -(-self.tokens[:, slot] // self.layout.tokens)
        return self.pages[:, slot][np.arange(self.pages.shape[3]) < counts[..., None]]

    def clear(self, slot: int) -> None:
        self.tokens[:, slot] = 0

    def shortage(self, slot: int, new_tokens: int) -> Ids:
        """Pages that each head row lacks to take ``new_tokens`` more: [layers, kv_heads]."""
        have = -(-self.tokens[:, slot] // self.layout.tokens)
        return -(-(self.tokens[:, slot] + new_tokens) // self.layout.tokens) - have

    def append_pages(self, slot: int, shortage: Ids, ids: Ids) -> None:
        """Put new pages behind the present ones of each row, in row order."""
        have = -(-self.tokens[:, slot] // self.layout.tokens)
        column = np.arange(self.pages.shape[3])
        new: Mask = (column >= have[..., None]) & (column < (have + shortage)[..., None])
        self.pages[:, slot][new] = ids

    def drop_first_pages(self, slot: int, count: int) -> Ids:
        """Forget the oldest ``count`` full pages of each row; returns their ids."""
        table = self.pages[:, slot]
        gone = table[..., :count].ravel().copy()
        table[..., :-count] = table[..., count:].copy()
        self.tokens[:, slot] -= count * self.layout.tokens
        return gone
