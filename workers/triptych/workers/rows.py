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

from triptych.core.layout import PageLayout
from triptych.kernels import Section

Ids = NDArray[np.int32]
Mask = NDArray[np.bool_]


@dataclass(eq=False)
class SectionTable:
    """Pages of one format of all head rows: a dense, growing list per row."""

    layout: PageLayout
    pages: Ids
    """Page ids, oldest first, [layers, slots, kv_heads, pages of a row]."""
    tokens: Ids
    """Tokens stored, [layers, slots, kv_heads]."""
    backward: bool = False
    """Whether ``pages`` shows the cells of its memory from the last one on."""

    def sharing_cells(self, layout: PageLayout, tokens: Ids) -> "SectionTable":
        """A table of another format in the same cells, from the other side.

        Two classes of one row never meet if a row has one cell more than its tokens take in the
        class with the larger tokens: ceil(a/t) + ceil(b/u) <= ceil((a + b)/t) + 1 for u >= t.

        Source: LeanKV and DiffKV (bidirectional page table; their tables lack that cell)
        """
        return SectionTable(layout, self.pages[..., ::-1], tokens, not self.backward)

    def __post_init__(self) -> None:
        cells = self.pages[..., ::-1] if self.backward else self.pages
        self._sections = [
            Section(self.layout, torch.from_numpy(pages), torch.from_numpy(tokens), self.backward)
            for pages, tokens in zip(cells, self.tokens, strict=True)
        ]
        layers, slots, kv_heads, width = cells.shape
        self.every_layer = Section(
            self.layout,
            torch.from_numpy(cells.reshape(layers * slots, kv_heads, width)),
            torch.from_numpy(self.tokens.reshape(layers * slots, kv_heads)),
            self.backward,
        )
        """All rows as one view: slot s of layer l is slot ``l * slots + s``."""

    @property
    def width(self) -> int:
        """The most pages that a row can have."""
        return self.pages.shape[3]

    def section(self, layer: int) -> Section:
        """What the attention kernel reads: a view, so it always shows the present state."""
        return self._sections[layer]

    def fill(self, slot: int, tokens: Ids, ids: Ids) -> None:
        """Set a slot's rows from a handle: tokens [head rows], page ids in row order."""
        layers, _, kv_heads, width = self.pages.shape
        counts = -(-tokens // self.layout.tokens)
        used: Mask = np.arange(width) < counts[:, None]
        self.pages[:, slot][used.reshape(layers, kv_heads, width)] = ids
        self.tokens[:, slot] = tokens.reshape(layers, kv_heads)

    def read(self, slot: int) -> tuple[Ids, Ids]:
        """What ``fill`` would set: tokens [head rows], and page ids in row order."""
        tokens = self.tokens[:, slot]
        counts = -(-tokens // np.int32(self.layout.tokens))
        used: Mask = np.arange(self.width) < counts[..., None]
        return tokens.ravel(), self.pages[:, slot][used]

    def run(self, slot: int) -> tuple[str, Ids, Ids]:
        """What ``read`` gives, behind the name of the format."""
        return (self.layout.format.name, *self.read(slot))

    def clear(self, slot: int) -> None:
        self.tokens[:, slot] = 0

    def has_room(self, slot: int) -> bool:
        """Whether each row can take one more token; for tables whose rows are equally long."""
        return int(self.tokens[0, slot, 0]) % self.layout.tokens != 0

    def shortage(self, slot: int, tokens: Ids) -> Ids:
        """Pages that each head row lacks to hold ``tokens`` in all, [layers, kv_heads]."""
        have = -(-self.tokens[:, slot] // self.layout.tokens)
        return np.maximum(-(-tokens // self.layout.tokens) - have, 0)

    def append_pages(self, slot: int, shortage: Ids, ids: Ids) -> None:
        """Put new pages behind the present ones of each row, in row order."""
        have = -(-self.tokens[:, slot] // self.layout.tokens)
        wanted = shortage.ravel()
        row = np.repeat(np.arange(wanted.size), wanted)
        behind = np.arange(len(ids)) - np.repeat(np.cumsum(wanted) - wanted, wanted)
        layer, head = np.divmod(row, shortage.shape[1])
        self.pages[layer, slot, head, have.ravel()[row] + behind] = ids

    def next_cells(self, slots: Ids) -> tuple[Ids, Ids]:
        """Page and row of the next token of each head row, [layers, slots, kv_heads] each."""
        page, row = np.divmod(self.tokens[:, slots], np.int32(self.layout.tokens))
        layers, _, kv_heads, _ = self.pages.shape
        layer, head = np.arange(layers)[:, None, None], np.arange(kv_heads)
        return self.pages[layer, slots[:, None], head, page], row
