# pyright: reportUnknownMemberType=false
# Tensor.tolist has no element type.
"""Reference of ``plan_retirement``: DiffKV's Algorithm 1 for several tokens at once."""

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.core.layout import PageLayout
from triptych.kernels.pages import Section, segments

NONE = -1


Numbers = TypeVar("Numbers", Tensor, NDArray[np.int32])


@dataclass(frozen=True, eq=False)
class Retirement(Generic[Numbers]):
    """The plan of a retirement: places of T new tokens and of the downgraded tokens, by head row.

    A place is the index of a token among those of its class in a head row. The plan is one array,
    int32 [..., 2 + 3 T], so that a checkpoint copies it at once.
    """

    numbers: Numbers

    @staticmethod
    def width(tokens: int) -> int:
        """Length of the plan of one head row, for ``tokens`` new tokens."""
        return 2 + 3 * tokens

    @property
    def tokens(self) -> int:
        """T, the number of new tokens."""
        return (self.numbers.shape[-1] - 2) // 3

    @property
    def counts(self) -> Numbers:
        """[..., 2]: number of high and of low tokens after the retirement."""
        return self.numbers[..., :2]

    @property
    def places(self) -> Numbers:
        """[..., T]: places in high of the new tokens."""
        return self._part(0)

    @property
    def downgraded(self) -> Numbers:
        """[..., T]: places in high of the downgraded tokens; NONE after the last one."""
        return self._part(1)

    @property
    def downgraded_places(self) -> Numbers:
        """[..., T]: place in low of each downgraded token; NONE: it is dropped."""
        return self._part(2)

    def _part(self, index: int) -> Numbers:
        start = 2 + index * self.tokens
        return self.numbers[..., start : start + self.tokens]


def plan_retirement(
    arena: Tensor,
    high: Section,
    low: Section | None,
    slots: Tensor,
    now: Tensor,
    first_leaving: Tensor,
    limits: Tensor,
    *,
    count: int,
) -> Retirement[Tensor]:
    """Plan to add ``count`` new tokens to the high class of each head row and to downgrade others.

    The significance of a token is its score divided by the number of tokens after it. High tokens
    at the positions ``first_leaving .. first_leaving + count - 1`` leave the window and are
    classified by their significance:

    - High: the token stays. The least significant of the older high tokens is downgraded if it is
      below the high threshold: to low, or dropped if it is also below the low threshold.
    - Low: the token moves to low. The least significant low token is dropped if it is below the
      low threshold.
    - Below both thresholds: the token is dropped.

    Low tokens that are not tracked stay, whatever the low threshold is.

    ``limits``: the high and the low threshold of each head row.

    A new token takes the place of a token that left high, so the high pages have no gaps.

    The plan equals Algorithm 1 applied token after token with constant scores and thresholds: a
    token that has moved is not downgraded again, so the victims are the least significant tokens
    of the state before.

    Shapes:  arena [P, page_bytes]; slots, now (tokens seen), first_leaving [R]; limits [R, KH, 2]
    Dtypes:  uint8; int32; float64
    Promise: no token moves to a higher class; a head row grows by at most ``count`` tokens
    Source:  DiffKV, Algorithm 1; LeanKV, section 4.2 (generation phase)
    """
    rows = [
        _plan_row(
            row_tokens(arena, high, int(slots[r]), head, int(now[r])),
            _low_tokens(arena, low, int(slots[r]), head, int(now[r])),
            range(int(first_leaving[r]), int(first_leaving[r]) + count),
            float(limits[r, head, 0]),
            float(limits[r, head, 1]),
        )
        for r in range(len(slots))
        for head in range(high.tokens.shape[1])
    ]
    numbers = torch.tensor(rows, dtype=torch.int32, device=arena.device)
    return Retirement(numbers.view(len(slots), high.tokens.shape[1], Retirement.width(count)))


Token = tuple[int, float]
"""Position and significance."""


def _plan_row(
    high: list[Token], low: list[Token], leaving_positions: range, is_high: float, is_low: float
) -> list[int]:
    """The plan of one head row, in the order of ``Retirement``."""
    leaving = [place for place, (position, _) in enumerate(high) if position in leaving_positions]
    still_high = sum(high[place][1] >= is_high for place in leaving)
    to_low = [place for place in leaving if is_low <= high[place][1] < is_high]
    dropped = [place for place in leaving if high[place][1] < min(is_low, is_high)]
    older = [
        (mean, p) for p, (position, mean) in enumerate(high) if position < leaving_positions.start
    ]
    victims = _least(older, is_high, still_high)
    dropped_low = _least([(mean, p) for p, (_, mean) in enumerate(low)], is_low, len(to_low))

    downgraded = [*to_low, *dropped, *victims]
    low_places = iter([*dropped_low, *range(len(low), len(low) + len(downgraded))])
    downgraded_places = [next(low_places) if high[p][1] >= is_low else NONE for p in downgraded]
    behind = range(len(high), len(high) + len(leaving_positions) - len(downgraded))
    counts = [
        len(high) + len(behind),
        len(low) + len(downgraded) - downgraded_places.count(NONE) - len(dropped_low),
    ]
    unused = [NONE] * (len(leaving_positions) - len(downgraded))
    return [*counts, *downgraded, *behind, *downgraded, *unused, *downgraded_places, *unused]


def _low_tokens(arena: Tensor, low: Section | None, slot: int, head: int, now: int) -> list[Token]:
    """The low tokens of one head row; of those that are not tracked the significance is infinite,
    so that none is dropped."""
    if low is None:
        return []
    if low.layout.is_tracked:
        return row_tokens(arena, low, slot, head, now)
    return [(-1, float("inf"))] * int(low.tokens[slot, head])


def _least(tokens: list[tuple[float, int]], limit: float, count: int) -> list[int]:
    """Places of at most ``count`` tokens below ``limit``, in ascending order, then by place."""
    return [place for mean, place in sorted(tokens) if mean < limit][:count]


def row_tokens(arena: Tensor, section: Section, slot: int, head: int, now: int) -> list[Token]:
    """The tokens of one head row in the order of their places."""
    count = int(section.tokens[slot, head])
    pages = section.forward_pages[slot, head][: section.layout.pages(count)].long()
    positions, scores = _scores(arena, section.layout, pages)
    means = scores / (now - positions)
    return [(int(p), float(m)) for p, m in zip(positions[:count], means[:count], strict=True)]


def _scores(arena: Tensor, layout: PageLayout, pages: Tensor) -> tuple[Tensor, Tensor]:
    parts = segments(arena, layout)
    return parts.positions[pages].flatten(), parts.scores[pages].flatten()
