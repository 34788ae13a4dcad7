"""Page summaries: a few vectors a page from which its largest logit is guessed.

Two kinds. ``box``: for each channel the largest and the smallest number among the page's keys, so
that no key can have a larger product with a query than the page's score. ``moments``: the mean of
each quarter of the page's tokens, and by how much keys deviate from these, for each channel and
each quarter. It bounds nothing and ranks better: most keys of a page lie far from the corners of
its box, and a single fact among others moves the mean of its quarter.

Both are in the coordinates of the model, even if pages hold rotated keys: there some channels are
much louder than others, and a deviation for each says more than where all are alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from triptych.core.errors import ConfigError
from triptych.core.head_budgets import BUDGET_STEPS

Kind = Literal["box", "moments"]
KINDS: tuple[Kind, ...] = get_args(Kind)

TILE_PAGES = 16
"""Pages whose summaries lie together, channel by channel: the width of a vector register."""
BLOCKS = 4
"""Of a page's tokens, one after the other; ``moments`` knows the mean of each."""
CODE_BYTES: dict[Kind, int] = {"box": 2, "moments": 3}
"""For each channel of a page: the largest and the smallest number; means of four bits each, two to
a byte, the first below, and the deviation."""
NUMBERS: dict[Kind, int] = {"box": 4, "moments": 3 * BLOCKS}
"""Of a page: scale and zero of each vector; scale and zero of the mean and scale of the deviation
of each block."""
POSITIONS = 2
"""Of a page: the smallest and the largest position of its tokens."""
WHOLE = 1 << 16
"""Parts that ``Rule.keep`` counts in."""
DEVIATIONS = 3.0
"""Standard deviations above the mean at which ``moments`` expects a block's largest logit."""


def tile_bytes(kind: Kind, head_dim: int) -> int:
    """Bytes of the summaries of ``TILE_PAGES`` pages: codes, then numbers, then positions."""
    return TILE_PAGES * summary_bytes(kind, head_dim)


def summary_bytes(kind: Kind, head_dim: int) -> int:
    """Bytes of the summary of one page: 248 or 152 at head_dim 64, 6.9 or 4.2 % of a page."""
    return CODE_BYTES[kind] * head_dim + 4 * (NUMBERS[kind] + POSITIONS)


def block_ends(tokens: int) -> list[tuple[int, int]]:
    """First token of each block of a page, and the one behind its last; never none."""
    starts = [block * tokens // BLOCKS for block in range(BLOCKS)]
    ends = [(block + 1) * tokens // BLOCKS for block in range(BLOCKS)]
    return [(start, max(start + 1, end)) for start, end in zip(starts, ends, strict=True)]


@dataclass(frozen=True, slots=True, eq=False)
class Summaries:
    """Summaries of the full pages of one section, in the order of the section's page lists.

    The last page of a head row is read in any case, and its summary is never looked at.
    """

    kind: Kind
    memory: Tensor
    """uint8 [S, KH, tiles, bytes of a tile], the last two dense."""
    head_dim: int
    rotated: bool = False
    """Whether the pages hold keys that ``hadamard`` has rotated."""

    def __post_init__(self) -> None:
        memory, size = self.memory, tile_bytes(self.kind, self.head_dim)
        dense = memory.dim() == 4 and memory.stride()[2:] == (memory.shape[3], 1)
        if memory.dtype != torch.uint8 or not dense or memory.shape[3] != size:
            raise ConfigError(
                f"summaries {tuple(memory.shape)} {memory.dtype}: expected uint8 "
                f"[slots, KV heads, tiles, {size}]"
            )

    @property
    def pages(self) -> int:
        """Pages of a head row that there is room for."""
        return self.memory.shape[2] * TILE_PAGES

    @property
    def codes(self) -> Tensor:
        """uint8 [S, KH, tiles, ``CODE_BYTES``, d, pages of a tile]."""
        return _split(self._part(0, self._codes), CODE_BYTES[self.kind], self.head_dim, TILE_PAGES)

    @property
    def numbers(self) -> Tensor:
        """float32 [S, KH, tiles, ``NUMBERS``, pages of a tile]."""
        end = self._codes + 4 * NUMBERS[self.kind] * TILE_PAGES
        part = self._part(self._codes, end).view(torch.float32)
        return _split(part, NUMBERS[self.kind], TILE_PAGES)

    @property
    def positions(self) -> Tensor:
        """int32 [S, KH, tiles, 2, pages of a tile]: oldest and newest."""
        start = self._codes + 4 * NUMBERS[self.kind] * TILE_PAGES
        part = self._part(start, self.memory.shape[3]).view(torch.int32)
        return _split(part, POSITIONS, TILE_PAGES)

    @property
    def _codes(self) -> int:
        """Bytes of the codes of a tile."""
        return CODE_BYTES[self.kind] * self.head_dim * TILE_PAGES

    def _part(self, start: int, end: int) -> Tensor:
        return self.memory[..., start:end]


def _split(part: Tensor, *sizes: int) -> Tensor:
    """``part`` [S, KH, tiles, n] as [S, KH, tiles, *sizes]."""
    return part.view(*part.shape[:3], *sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How many pages of a head row are read, and which in any case.

    Pages are equally large, so a share of them is a share of the bytes. Always read are pages
    that hold one of the first ``sink_tokens`` positions or of the newest ``window_tokens``, the
    last page of each section, and sections without summaries; they count as read.
    """

    keep: int
    """Pages that are read, of 65,536; see ``of``."""
    budget_tokens: int = 0
    """If these tokens fill more pages than ``keep``, so many pages are read instead."""
    sink_tokens: int = 4
    window_tokens: int = 64
    omitted_mass: float = 0.0
    """More pages are read until those that are not are expected to receive no more than this
    share of the attention that goes to pages with summaries; 0: no more are. Needs ``moments``."""

    @classmethod
    def of(
        cls,
        keep_fraction: float,
        budget_tokens: int = 0,
        sink_tokens: int = 4,
        window_tokens: int = 64,
        omitted_mass: float = 0.0,
    ) -> "Rule":
        """The fraction in whole parts, so that every backend counts the same pages."""
        return cls(
            keep=round(keep_fraction * WHOLE),
            budget_tokens=budget_tokens,
            sink_tokens=sink_tokens,
            window_tokens=window_tokens,
            omitted_mass=omitted_mass,
        )

    def pages(self, pages: int, tokens: int, head_budgets: Sequence[int] = ()) -> int:
        """Pages to read of a head row that has so many, rounded up.

        ``head_budgets``: what this head reads, of ``WHOLE``, where all together read 0, 1 and
        on to ``BUDGET_STEPS`` of as many parts of their pages; none: the same.
        """
        mean = min(WHOLE, max(self.keep, self.budget_tokens * WHOLE // max(1, tokens)))
        own = interpolate(head_budgets, mean) if head_budgets else mean
        return min(pages, -(-pages * own // WHOLE))


def interpolate(head_budgets: Sequence[int], mean: int) -> int:
    """What a head reads for any mean share, on the line between two steps, rounded up."""
    size = WHOLE // BUDGET_STEPS
    step, rest = divmod(mean, size)
    low, high = head_budgets[step], head_budgets[min(step + 1, BUDGET_STEPS)]
    return low + -(-(high - low) * rest // size)


def check_head_budgets(head_budgets: Tensor | None, kv_heads: int) -> None:
    """Raises: ConfigError if it is not int32 [KV heads, ``BUDGET_STEPS`` + 1], dense"""
    if head_budgets is None:
        return
    shape = (kv_heads, BUDGET_STEPS + 1)
    if (
        head_budgets.dtype != torch.int32
        or head_budgets.shape != shape
        or not head_budgets.is_contiguous()
    ):
        raise ConfigError(
            f"select_pages: head_budgets {tuple(head_budgets.shape)} {head_budgets.dtype}: "
            f"expected a dense int32 {shape}"
        )


def check_summaries(summaries: Sequence[Summaries | None], rule: Rule) -> Summaries | None:
    """The first of the summaries, if there are any.

    Raises: ConfigError if they are not all of one form, or do not tell what the rule asks for
    """
    known = [part for part in summaries if part is not None]
    forms = {(part.kind, part.rotated) for part in known}
    if len(forms) > 1:
        raise ConfigError(f"select_pages: summaries of the forms {sorted(forms)}: expected one")
    if rule.omitted_mass > 0 and known and known[0].kind != "moments":
        raise ConfigError(
            f"omitted_mass={rule.omitted_mass} with {known[0].kind!r} summaries: expected "
            "'moments'; a box does not tell what a page is expected to receive"
        )
    return known[0] if known else None
