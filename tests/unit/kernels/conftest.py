"""Fixtures of kernel tests: pages filled with garbage, then with some tokens."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from tests.moves import layout_named
from triptych.core.layout import FORMATS, KeyOrder, PageLayout, default_page_bytes
from triptych.kernels import Section, load_tokens, move_tokens, store_tokens


@pytest.fixture(autouse=True)
def fresh_numbers(request: pytest.FixtureRequest) -> None:
    """Random numbers that differ between tests and are the same in each run."""
    torch.manual_seed(sum(request.node.name.encode()))


@dataclass(frozen=True)
class Stored:
    """Head rows of several slots, stored in pages of one format and read back."""

    section: Section
    """Unused page ids are far out of range."""
    key: Tensor
    """float64 [S, KH, N, d]; 0 beyond the end."""
    value: Tensor
    positions: Tensor
    """int32 [S, KH, N]; -1 beyond the end."""
    bias: Tensor
    """float64 [S, KH, N]; 0 if the layout has no biases."""


class Cache:
    """An arena filled with garbage; its pages are allocated in random order."""

    def __init__(self, head_dim: int, pages: int = 600, byte: int | None = 0xFF) -> None:
        self.head_dim, self.page_bytes = head_dim, default_page_bytes(head_dim)
        self.arena = torch.randint(0, 256, (pages, self.page_bytes), dtype=torch.uint8)
        if byte is not None:
            self.arena.fill_(byte)
        self._free = torch.randperm(pages).int()

    def fill(
        self,
        name: str,
        counts: list[list[int]],
        *,
        order: KeyOrder = "channel",
        first_position: int = 0,
        vectors: tuple[Tensor, Tensor] | None = None,
        has_bias: bool = False,
    ) -> Stored:
        """Store ``counts[slot][head]`` tokens, random ones if no [S, KH, N, d] are given.

        ``name``: as ``layout_named``. ``has_bias``: tokens have random logit biases. Counts of
        formats that are encoded page by page are rounded up to whole pages.
        """
        layout = replace(layout_named(name, self.head_dim, order), has_bias=has_bias)
        parts = layout.parts
        if layout.format.codes_whole_pages:
            counts = [[layout.pages(n) * layout.tokens for n in row] for row in counts]
        tokens = torch.tensor(counts, dtype=torch.int32)
        longest = max(1, int(tokens.max()))
        pages = torch.full((*tokens.shape, layout.pages(longest)), 2**30, dtype=torch.int32)
        key, value = vectors or torch.randn(2, *tokens.shape, longest, self.head_dim)
        value = key if layout.format.values_are_keys else value
        shape = (*tokens.shape, longest)
        bias = torch.randn(shape) * 2 if has_bias else torch.zeros(shape)
        for slot, row in enumerate(counts):
            for head, count in enumerate(row):
                wanted = layout.pool_pages(layout.pages(count))
                taken, self._free = self._free.split([wanted, len(self._free) - wanted])
                small = taken[:, None] * parts + torch.arange(parts, dtype=torch.int32)
                taken = small.flatten()[: layout.pages(count)].flip(0)
                pages[slot, head, : len(taken)] = taken
                token = torch.arange(count)
                if layout.format.codes_whole_pages:
                    self._encode(layout, taken, key[slot, head, :count], value[slot, head, :count])
                    continue
                store_tokens.on("reference")(
                    self.arena,
                    layout,
                    key[slot, head, :count, None],
                    value[slot, head, :count, None],
                    taken[token // layout.tokens][:, None],
                    (token % layout.tokens).int()[:, None],
                    (token + first_position).int(),
                    bias[slot, head, :count, None],
                )
        loaded = load_tokens.on("reference")(
            self.arena, layout, pages.flatten(0, 1), tokens.flatten()
        )
        keys, values, positions = (part.view(*tokens.shape, *part.shape[1:]) for part in loaded)
        bias = bias[..., : keys.shape[2]].double().where(positions >= 0, 0.0)
        section = Section(layout, pages, tokens)
        return Stored(section, keys.double(), values.double(), positions, bias)

    def _encode(self, layout: PageLayout, pages: Tensor, key: Tensor, value: Tensor) -> None:
        """Encode whole pages from raw ones behind the arena; positions from 0 on."""
        raw = replace(layout, format=FORMATS["fp16"])
        count, first = len(key), len(self.arena)
        behind = torch.arange(first, first + raw.pages(count)).int()
        arena = torch.cat((self.arena, self.arena.new_empty(len(behind), self.page_bytes)))
        token = torch.arange(count).int()
        at = behind[token.long() // raw.tokens], token % raw.tokens
        store_tokens.on("reference")(
            arena, raw, key[:, None], value[:, None], *(index[:, None] for index in at), token
        )
        held, slot = torch.tensor([[count]]).int(), torch.zeros(1, dtype=torch.int32)
        move_tokens.on("reference")(
            arena,
            Section(raw, behind[None, None], held),
            Section(layout, pages[None, None], held),
            slot,
            token[None, None],
            token[None, None],
        )
        self.arena[:] = arena[:first]


@pytest.fixture
def new_cache() -> Callable[..., Cache]:
    """The class itself: test modules cannot import from here."""
    return Cache
