"""Rows of tokens in pages of one format, some of which move to pages of another."""

from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.core.layout import (
    FORMATS,
    LATENT_FORMATS,
    KeyOrder,
    PageLayout,
    default_page_bytes,
    stored_format,
)
from triptych.kernels import Section, store_tokens

SLOTS, HEADS, WIDTH, MOST = 5, 2, 3, 6
USUAL = ("fp16", "k8v8", "k8v4", "k4v4", "k4v2")
"""Formats of which all pairs are tested."""
UNTRACKED = "k4v2 untracked"
"""Pages whose tokens have neither scores nor positions."""
WHOLE = tuple(name for name, form in FORMATS.items() if form.codes_whole_pages)
"""Formats whose pages are encoded whole."""
ALONE = tuple(name for name in FORMATS if name not in WHOLE)
"""Formats whose tokens can be written alone."""
ROUNDED = tuple(name for name in ALONE if FORMATS[name].is_stable)
"""Formats that give numbers back which were rounded to theirs."""
LATENTS = tuple(LATENT_FORMATS)
"""Formats whose values are their keys."""
PAIRS = (
    *((old, new) for old in USUAL for new in USUAL),
    *((old, new) for new in ALONE if new not in USUAL for old in ("fp16", "k8v8")),
    *((old, "k8v4") for old in ALONE if old not in USUAL),
    *((old, new) for old in LATENTS for new in LATENTS),
    *((old, UNTRACKED) for old in ("fp16", "k8v4")),
    (UNTRACKED, "k8v4"),
    ("k8v4", "k4v2c"),
    ("r3a5v4", "r3a5v2"),
)
"""Formats of moves: all pairs of usual ones, into and out of each other one, of latents, and
those of two methods."""


@dataclass(frozen=True)
class Moves:
    """What ``move_tokens`` takes: an arena whose source pages are full, sections, and places."""

    arena: Tensor
    source: Section
    target: Section
    slots: Tensor
    places: Tensor
    target_places: Tensor


def random_moves(source: str, target: str, head_dim: int) -> Moves:
    """The tables read from opposite sides; a third of the tokens stay, no two come to one place.

    ``source``, ``target``: a format, or ``k8v8/8`` for small pages, eight in one of the arena.
    """
    old, new = (layout_named(name, head_dim) for name in (source, target))
    pages = torch.randperm(2 * SLOTS * HEADS * WIDTH).int().view(2, SLOTS, HEADS, WIDTH)
    unused = torch.zeros(SLOTS, HEADS, dtype=torch.int32)
    arena = torch.randint(0, 256, (pages.numel(), old.page_bytes), dtype=torch.uint8)
    for some, layout in zip(pages, (old, new), strict=True):
        some.mul_(layout.parts).add_(torch.randint(layout.parts, some.shape, dtype=torch.int32))
    full = pages[0].flatten().repeat_interleave(old.tokens)
    rows, count = torch.arange(full.numel()).int() % old.tokens, full.numel()
    vectors, positions = torch.randn(count, 1, head_dim) * 3, torch.arange(count).int()
    store_tokens.on("reference")(
        arena, old, vectors, vectors, full[:, None], rows[:, None], positions, torch.rand(count, 1)
    )
    slots = torch.randperm(SLOTS)[:3].int()
    places, target_places = (
        torch.rand(3, HEADS, WIDTH * layout.tokens).argsort(-1)[..., :MOST].int()
        for layout in (old, new)
    )
    stays = torch.rand(target_places.shape) < 1 / 3
    return Moves(
        arena,
        Section(old, pages[0], unused),
        Section(new, pages[1], unused, backward=True),
        slots,
        places,
        target_places.masked_fill(stays, -1),
    )


def layout_named(name: str, head_dim: int, order: KeyOrder = "channel") -> PageLayout:
    """The layout of a format, of small pages (``k8v8/8``), or of ``UNTRACKED``."""
    form, _, parts = name.removesuffix(" untracked").partition("/")
    return PageLayout(
        stored_format(form),
        head_dim,
        default_page_bytes(head_dim),
        order,
        int(parts or 1),
        is_tracked=not name.endswith(" untracked"),
    )


def whole_moves(
    source: str, target: str, head_dim: int, order: KeyOrder, *, apart: float = 1.0
) -> Moves:
    """Moves of two whole pages of each head row of three slots, from pages of single tokens.

    ``apart``: what tokens of a row differ by; at 0 they are all the same.
    """
    old = layout_named(source, head_dim, "token")
    new = layout_named(target, head_dim, order)
    count, slots = 2 * new.tokens, 3
    rows = slots * HEADS
    table = torch.arange(rows * old.pages(count)).int().view(slots, HEADS, -1)
    first = old.pool_pages(table.numel())
    pages = (first + torch.randperm(rows * 2).int()).view(slots, HEADS, 2)
    arena = torch.randint(0, 256, (first + pages.numel(), old.page_bytes), dtype=torch.uint8)
    token = torch.arange(count)
    key = torch.randn(count, rows, head_dim) * torch.rand(head_dim) * 3
    value = torch.randn(count, rows, head_dim) * torch.rand(count, 1, 1)
    if apart < 1:
        key, value = (rows[:1] + apart * rows for rows in (key, value))
    ids = table.flatten(0, 1)[:, token // old.tokens].T
    at = ids, (token % old.tokens).int()[:, None].expand_as(ids)
    store_tokens.on("reference")(arena, old, key, value, *at, token.int(), torch.rand(ids.shape))
    held = torch.full((slots, HEADS), count, dtype=torch.int32)
    places = token.int().expand(slots, HEADS, count).clone()
    return Moves(
        arena,
        Section(old, table, held),
        Section(new, pages, held),
        torch.randperm(slots).int(),
        places,
        places.clone(),
    )
