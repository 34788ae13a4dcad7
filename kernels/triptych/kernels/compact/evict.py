# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# Tensor.tolist has no element type.
"""Reference of ``plan_eviction``: H2O's eviction of the token with the least attention."""

import torch
from torch import Tensor

from triptych.kernels.compact.retire import NONE, Retirement
from triptych.kernels.pages import Section, segments

Rank = tuple[bool, float, int]
"""Whether a token is among the newest, its score (or its position, if it is), and its place."""


def plan_eviction(
    arena: Tensor,
    high: Section,
    low: Section | None,
    slots: Tensor,
    most: Tensor,
    newest: Tensor,
    *,
    count: int,
) -> Retirement[Tensor]:
    """Plan to add ``count`` new tokens to the high class of each head row and to drop others.

    As many high tokens are dropped as a row has, with the new ones, above ``most`` high and low
    tokens, at most ``count``. First those with the lowest score go, which is the attention that
    they have received so far, not divided by their age. Tokens from position ``newest`` on go last,
    the oldest first. A new token takes the place of a dropped one, so the high pages have no gaps.

    The plan equals dropping one token before each new one, since scores do not change meanwhile and
    new tokens are among the newest.

    Shapes:  arena [P, page_bytes]; slots, most, newest [R]
    Dtypes:  uint8; int32
    Promise: a head row with at least ``most`` tokens keeps its number of tokens
    Source:  H2O, section 4 (accumulated attention, a budget that new tokens do not exceed); several
             tokens at a time is ours
    """
    rows = [
        _plan_row(
            _row(arena, high, int(slots[r]), head, int(newest[r])),
            int(low.tokens[int(slots[r]), head]) if low is not None else 0,
            int(most[r]),
            count,
        )
        for r in range(len(slots))
        for head in range(high.tokens.shape[1])
    ]
    numbers = torch.tensor(rows, dtype=torch.int32, device=arena.device)
    return Retirement(numbers.view(len(slots), high.tokens.shape[1], Retirement.width(count)))


def _plan_row(high: list[Rank], low: int, most: int, count: int) -> list[int]:
    """The plan of one head row, in the order of ``Retirement``."""
    excess = len(high) + low + count - most
    dropped = [place for _, _, place in sorted(high)][: max(0, min(count, excess))]
    behind = range(len(high), len(high) + count - len(dropped))
    unused = [NONE] * (count - len(dropped))
    return [len(high) + len(behind), low, *dropped, *behind, *dropped, *unused, *[NONE] * count]


def _row(arena: Tensor, section: Section, slot: int, head: int, newest: int) -> list[Rank]:
    """The high tokens of one head row in the order of their places."""
    count, layout = int(section.tokens[slot, head]), section.layout
    pages = section.forward_pages[slot, head][: layout.pages(count)].long()
    parts = segments(arena, layout)
    positions: list[int] = parts.positions[pages].flatten().tolist()
    scores: list[float] = parts.scores[pages].flatten().tolist()
    named = zip(range(count), positions, scores, strict=False)
    return [(at >= newest, at if at >= newest else score, place) for place, at, score in named]
