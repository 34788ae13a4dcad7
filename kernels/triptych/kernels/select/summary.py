"""Page summaries: a few vectors or codes per page, from which its largest logit is estimated.

There are three kinds. ``box`` has the largest and smallest number of each channel among the keys
of the page; the score of a page is an upper bound of its logits. ``moments`` has the mean of each
quarter of the page's tokens, and the deviation of the keys from these means, by channel and by
quarter. Its score is no bound, but ranks pages better: most keys of a page are far from the corners
of its box, and one outstanding key moves the mean of its quarter.

``a2ats`` has a code of each token, the nearest of 256 keys of its head; its score is the largest
logit of the keys that the codes stand for (``key_codes``).

All are computed in the coordinates of the model, also if pages hold rotated keys: there the
channels differ most in their deviation, so that a deviation per channel is most informative.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from triptych.core.errors import ConfigError
from triptych.core.head_budgets import BUDGET_STEPS
from triptych.kernels.select.key_codes import KeyCodebooks

Kind = Literal["box", "moments", "a2ats"]
KINDS: tuple[Kind, ...] = ("box", "moments")
"""Those of keys alone; ``a2ats`` needs codebooks of a model."""

TILE_PAGES = 16
"""Pages whose summaries are interleaved channel by channel: the lanes of a vector register."""
BLOCKS = 4
"""Consecutive blocks of a page's tokens; ``moments`` has the mean of each."""
CODE_BYTES: dict[Kind, int] = {"box": 2, "moments": 3, "a2ats": 0}
"""Bytes per channel of a page. ``box``: largest and smallest number. ``moments``: means of 4 bits,
two to a byte, the first in the low bits, and the deviation. ``a2ats``: none, but one for each token
of the page."""
NUMBERS: dict[Kind, int] = {"box": 4, "moments": 3 * BLOCKS, "a2ats": 0}
"""Numbers of a page. ``box``: scale and zero of each vector. ``moments``: for each block scale and
zero of the mean, and scale of the deviation."""
POSITIONS = 2
"""Position entries of a page: the smallest and the largest position of its tokens."""
WHOLE = 1 << 16
"""The unit of ``Rule.keep``: 65,536 parts are all pages."""
DEVIATIONS = 3.0
"""``moments`` estimates the largest logit of a block as mean plus this many deviations."""


def tile_bytes(kind: Kind, head_dim: int, page_tokens: int = 0) -> int:
    """Bytes of a tile, the summaries of ``TILE_PAGES`` pages: codes, numbers, positions."""
    return TILE_PAGES * summary_bytes(kind, head_dim, page_tokens)


def summary_bytes(kind: Kind, head_dim: int, page_tokens: int = 0) -> int:
    """Bytes of the summary of one page.

    ``page_tokens``: tokens of a page, of which ``a2ats`` has codes; others do not depend on it.

    At head_dim 64: 248 for ``moments`` and 152 for ``box``, 6.9 and 4.2 % of a page.
    """
    of_tokens = page_tokens if kind == "a2ats" else 0
    return of_tokens + CODE_BYTES[kind] * head_dim + 4 * (NUMBERS[kind] + POSITIONS)


def block_ends(tokens: int) -> list[tuple[int, int]]:
    """Start and end (exclusive) of each block of a page; each has at least one token."""
    starts = [block * tokens // BLOCKS for block in range(BLOCKS)]
    ends = [(block + 1) * tokens // BLOCKS for block in range(BLOCKS)]
    return [(start, max(start + 1, end)) for start, end in zip(starts, ends, strict=True)]


@dataclass(frozen=True, slots=True, eq=False)
class Summaries:
    """Summaries of the full pages of one section, in the order of its page table.

    The last page of a head row is always read; its summary is not used.
    """

    kind: Kind
    memory: Tensor
    """uint8 [S, KH, tiles, bytes of a tile], the last two dense."""
    head_dim: int
    rotated: bool = False
    """Whether the pages hold keys that ``hadamard`` has rotated."""
    page_tokens: int = 0
    """Tokens of a page, for ``a2ats``."""
    codebooks: KeyCodebooks | None = None
    """Those of ``a2ats``."""

    def __post_init__(self) -> None:
        if self.kind == "a2ats" and (self.codebooks is None or not self.page_tokens):
            raise ConfigError("summaries of kind 'a2ats': expected codebooks and tokens of a page")
        size = tile_bytes(self.kind, self.head_dim, self.page_tokens)
        memory = self.memory
        dense = memory.dim() == 4 and memory.stride()[2:] == (memory.shape[3], 1)
        if memory.dtype != torch.uint8 or not dense or memory.shape[3] != size:
            raise ConfigError(
                f"summaries {tuple(memory.shape)} {memory.dtype}: expected uint8 "
                f"[slots, KV heads, tiles, {size}]"
            )

    @property
    def pages(self) -> int:
        """Number of pages of a head row that the memory has summaries for."""
        return self.memory.shape[2] * TILE_PAGES

    @property
    def codes(self) -> Tensor:
        """uint8 [S, KH, tiles, ``CODE_BYTES``, d, pages of a tile]."""
        return _split(self._part(0, self._codes), CODE_BYTES[self.kind], self.head_dim, TILE_PAGES)

    @property
    def token_codes(self) -> Tensor:
        """uint8 [S, KH, tiles, pages of a tile, tokens of a page], of ``a2ats``."""
        return _split(self._part(0, self._codes), TILE_PAGES, self.page_tokens)

    @property
    def numbers(self) -> Tensor:
        """float32 [S, KH, tiles, ``NUMBERS``, pages of a tile]."""
        end = self._codes + 4 * NUMBERS[self.kind] * TILE_PAGES
        part = self._part(self._codes, end).view(torch.float32)
        return _split(part, NUMBERS[self.kind], TILE_PAGES)

    @property
    def positions(self) -> Tensor:
        """int32 [S, KH, tiles, 2, pages of a tile]: smallest and largest position."""
        start = self._codes + 4 * NUMBERS[self.kind] * TILE_PAGES
        part = self._part(start, self.memory.shape[3]).view(torch.int32)
        return _split(part, POSITIONS, TILE_PAGES)

    @property
    def _codes(self) -> int:
        """Bytes of the codes of a tile."""
        if self.kind == "a2ats":
            return self.page_tokens * TILE_PAGES
        return CODE_BYTES[self.kind] * self.head_dim * TILE_PAGES

    def _part(self, start: int, end: int) -> Tensor:
        return self.memory[..., start:end]


def _split(part: Tensor, *sizes: int) -> Tensor:
    """``part`` [S, KH, tiles, n] as [S, KH, tiles, *sizes]."""
    return part.view(*part.shape[:3], *sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How many pages of a head row are read, and which pages are always read.

    Small pages count as the pages of the arena that they fill, so a share of the pages is a share
    of the bytes. Always read are
    pages with one of the first ``sink_tokens`` positions or of the newest ``window_tokens``, the
    last page of each section, and sections without summaries. They count towards the number.
    """

    keep: int
    """Share of the pages that are read, in parts of 65,536; see ``of``."""
    budget_tokens: int = 0
    """If these tokens fill more pages than ``keep``, that many pages are read."""
    sink_tokens: int = 4
    window_tokens: int = 64
    omitted_mass: float = 0.0
    """Largest expected share of attention of the pages that are not read, among pages with
    summaries: more pages are read until it holds. 0: no limit. Needs ``moments``."""

    @classmethod
    def of(
        cls,
        keep_fraction: float,
        budget_tokens: int = 0,
        sink_tokens: int = 4,
        window_tokens: int = 64,
        omitted_mass: float = 0.0,
    ) -> "Rule":
        """A rule from a fraction, rounded to parts of 65,536 so that all backends count alike."""
        return cls(
            keep=round(keep_fraction * WHOLE),
            budget_tokens=budget_tokens,
            sink_tokens=sink_tokens,
            window_tokens=window_tokens,
            omitted_mass=omitted_mass,
        )

    def pages(
        self, pages: int, tokens: int, head_budgets: Sequence[int] = (), small: int = 0
    ) -> int:
        """Number of pages to read of a head row of ``pages`` pages and ``tokens``, rounded up.

        ``small``: how many fewer pages of the arena these are, since small pages share one.
        ``head_budgets``: the share of this head, in parts of ``WHOLE``, for each mean share of
        0, 1, ... ``BUDGET_STEPS`` parts of ``BUDGET_STEPS``; empty: the mean share.
        """
        mean = min(WHOLE, max(self.keep, self.budget_tokens * WHOLE // max(1, tokens)))
        own = interpolate(head_budgets, mean) if head_budgets else mean
        return min(pages, small - (small - pages) * own // WHOLE)


def interpolate(head_budgets: Sequence[int], mean: int) -> int:
    """The share of a head for a mean share, interpolated between two steps, rounded up."""
    size = WHOLE // BUDGET_STEPS
    step, rest = divmod(mean, size)
    low, high = head_budgets[step], head_budgets[min(step + 1, BUDGET_STEPS)]
    return low + -(-(high - low) * rest // size)


def check_head_budgets(head_budgets: Tensor | None, kv_heads: int) -> None:
    """Raise ``ConfigError`` unless it is dense int32 [KV heads, ``BUDGET_STEPS`` + 1] or None."""
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
    """The first summaries of the sections; None if no section has any.

    Raises: ConfigError if their kind or rotation differs, or the rule needs another kind
    """
    known = [part for part in summaries if part is not None]
    forms = {(part.kind, part.rotated) for part in known}
    if len(forms) > 1:
        raise ConfigError(f"select_pages: summaries of the forms {sorted(forms)}: expected one")
    if rule.omitted_mass > 0 and known and known[0].kind != "moments":
        raise ConfigError(
            f"omitted_mass={rule.omitted_mass} with {known[0].kind!r} summaries: expected "
            "'moments'; a box has no estimate of the attention of a page"
        )
    return known[0] if known else None
