# pyright: reportUnknownMemberType=false
# Tensor.tolist has no element type.
"""What leaving the window means: Algorithm 1 for many tokens at once."""

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
    """Who goes where, for T tokens of each head row; a place is an index into the list of a class.

    All of it is one array, int32 [..., 2 + 3 T], so that it is written down at once.
    """

    numbers: Numbers

    @staticmethod
    def width(tokens: int) -> int:
        """Numbers of one head row."""
        return 2 + 3 * tokens

    @property
    def tokens(self) -> int:
        """T."""
        return (self.numbers.shape[-1] - 2) // 3

    @property
    def counts(self) -> Numbers:
        """[..., 2]: high and low tokens afterwards."""
        return self.numbers[..., :2]

    @property
    def places(self) -> Numbers:
        """[..., T]: places in high of the tokens that come."""
        return self._part(0)

    @property
    def movers(self) -> Numbers:
        """[..., T]: places of high tokens that step down; NONE behind the last."""
        return self._part(1)

    @property
    def mover_places(self) -> Numbers:
        """[..., T]: place in low of each mover; NONE: it is dropped."""
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
    judged: Tensor,
    *,
    count: int,
    alpha_high: float,
    alpha_low: float,
) -> Retirement[Tensor]:
    """Let ``count`` new tokens of each head row into high, and choose who steps down for them.

    A token's significance is its score over the number of tokens that came since. Each high token
    at the positions ``judged .. judged + count - 1`` leaves the window and is judged. If it is
    still high, the least significant of the older high tokens steps down, unless that is high too:
    to low, or away if it is not even low. If it is low, it goes there, and the least significant
    low token is dropped if that is no longer low. Otherwise it is dropped. Who comes takes the
    place of who went, so high never has a hole.

    That is Algorithm 1, token after token, for scores and thresholds that stand still meanwhile:
    nobody who moves is a victim later on, so the victims are the least significant from before.

    Shapes:  arena [P, page_bytes]; slots, now (tokens seen), judged [R]
    Dtypes:  uint8; int32
    Promise: no token goes up; the tokens of a head row grow by at most ``count``
    Source:  DiffKV, Algorithm 1; LeanKV, section 4.2 (generation phase)
    """
    rows = [
        _plan_row(
            _row(arena, high, int(slots[r]), head, int(now[r])),
            _row(arena, low, int(slots[r]), head, int(now[r])) if low is not None else [],
            range(int(judged[r]), int(judged[r]) + count),
            min(1.0, alpha_high / int(now[r])),
            min(1.0, alpha_low / int(now[r])),
        )
        for r in range(len(slots))
        for head in range(high.tokens.shape[1])
    ]
    numbers = torch.tensor(rows, dtype=torch.int32, device=arena.device)
    return Retirement(numbers.view(len(slots), high.tokens.shape[1], Retirement.width(count)))


Token = tuple[int, float]
"""Position and significance."""


def _plan_row(
    high: list[Token], low: list[Token], judged: range, is_high: float, is_low: float
) -> list[int]:
    """One head row: counts, places of newcomers, movers, places of movers."""
    leaving = [place for place, (position, _) in enumerate(high) if position in judged]
    still_high = sum(high[place][1] >= is_high for place in leaving)
    to_low = [place for place in leaving if is_low <= high[place][1] < is_high]
    dropped = [place for place in leaving if high[place][1] < min(is_low, is_high)]
    older = [(mean, p) for p, (position, mean) in enumerate(high) if position < judged.start]
    victims = _least(older, is_high, still_high)
    outcasts = _least([(mean, p) for p, (_, mean) in enumerate(low)], is_low, len(to_low))

    movers = [*to_low, *dropped, *victims]
    low_places = iter([*outcasts, *range(len(low), len(low) + len(movers))])
    mover_places = [next(low_places) if high[p][1] >= is_low else NONE for p in movers]
    behind = range(len(high), len(high) + len(judged) - len(movers))
    counts = [
        len(high) + len(behind),
        len(low) + len(movers) - mover_places.count(NONE) - len(outcasts),
    ]
    unused = [NONE] * (len(judged) - len(movers))
    return [*counts, *movers, *behind, *movers, *unused, *mover_places, *unused]


def _least(tokens: list[tuple[float, int]], limit: float, count: int) -> list[int]:
    """Places of at most ``count`` tokens below ``limit``, least one first, then by place."""
    return [place for mean, place in sorted(tokens) if mean < limit][:count]


def _row(arena: Tensor, section: Section, slot: int, head: int, now: int) -> list[Token]:
    """The tokens of one head row in the order of their places."""
    count = int(section.tokens[slot, head])
    pages = section.forward_pages[slot, head][: section.layout.pages(count)].long()
    positions, scores = _scores(arena, section.layout, pages)
    means = scores / (now - positions)
    return [(int(p), float(m)) for p, m in zip(positions[:count], means[:count], strict=True)]


def _scores(arena: Tensor, layout: PageLayout, pages: Tensor) -> tuple[Tensor, Tensor]:
    parts = segments(arena, layout)
    return parts.positions[pages].flatten(), parts.scores[pages].flatten()
