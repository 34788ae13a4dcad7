# pyright: reportUnknownMemberType=false
# Tensor.tolist has no element type.
"""What leaving the window means: Algorithm 1 for a whole page of tokens at once."""

from typing import NamedTuple

import torch
from torch import Tensor

from triptych.core.layout import PageLayout
from triptych.kernels.compact.reference import DROPPED, HIGH, LOW
from triptych.kernels.pages import Section, segments

NONE = -1


class Retirement(NamedTuple):
    """Where tokens go; a target is a place in the list of its class, NONE if it has none."""

    classes: Tensor
    """uint8 [R, KH, T], of each token that leaves the window."""
    targets: Tensor
    """int32 [R, KH, T], its place in that class."""
    victims: Tensor
    """int32 [R, KH, T], places of high tokens that step down for them, least one first."""
    victim_targets: Tensor
    """int32 [R, KH, T], place in low of each victim; NONE: it is dropped."""
    counts: Tensor
    """int32 [R, KH, 2], high and low tokens afterwards."""


def plan_retirement(
    arena: Tensor,
    raw: PageLayout,
    leaving: Tensor,
    high: Section,
    low: Section | None,
    slots: Tensor,
    now: Tensor,
    *,
    alpha_high: float,
    alpha_low: float,
) -> Retirement:
    """Class the tokens of one raw page of each head row, and choose who steps down for them.

    A token's significance is its score over the number of tokens that came since. Each token
    that leaves the window and is high sends the least significant high token down, if that one is
    no longer high: to low, or away if it is not even low. Each that is low lets the least
    significant low token drop, if that is no longer low. Those who come take the places of those
    who go, the rest is appended, so a class never has a hole.

    That is Algorithm 1, token after token, for scores and thresholds that stand still meanwhile:
    who comes is never a victim, so the victims are the least significant tokens from before.

    Shapes:  arena [P, page_bytes]; leaving [R, KH], raw page ids; slots, now [R]: tokens seen
    Dtypes:  uint8; int32
    Promise: no token goes up; the tokens of a head row grow by at most those that leave
    Source:  DiffKV, Algorithm 1; LeanKV, section 4.2 (generation phase)
    """
    means = _mean(arena, raw, leaving[..., None], now)
    rows = [
        _plan_row(
            _floats(means[r, head]),
            _row_means(arena, high, int(slot), head, int(now[r])),
            _row_means(arena, low, int(slot), head, int(now[r])) if low is not None else [],
            min(1.0, alpha_high / int(now[r])),
            min(1.0, alpha_low / int(now[r])),
        )
        for r, slot in enumerate(slots)
        for head in range(leaving.shape[1])
    ]
    shape = tuple(leaving.shape)
    columns = [torch.tensor(part, dtype=torch.int32) for part in zip(*rows, strict=True)]
    classes, targets, victims, victim_targets, counts = (
        column.view(*shape, -1).to(arena.device) for column in columns
    )
    return Retirement(classes.to(torch.uint8), targets, victims, victim_targets, counts)


def _plan_row(
    leaving: list[float], high: list[float], low: list[float], is_high: float, is_low: float
) -> tuple[list[int], list[int], list[int], list[int], list[int]]:
    """One head row: classes, targets, victims, targets of victims, counts."""
    classes = [HIGH if m >= is_high else LOW if m >= is_low else DROPPED for m in leaving]
    come_high, come_low = classes.count(HIGH), classes.count(LOW)
    victims = _least(high, is_high, come_high)
    outcasts = _least(low, is_low, come_low)
    high_places = iter([*victims, *range(len(high), len(high) + come_high)])
    low_places = iter([*outcasts, *range(len(low), len(low) + come_low + len(victims))])
    places = {HIGH: high_places, LOW: low_places}
    targets = [next(places[name]) if name != DROPPED else NONE for name in classes]
    fallen = [next(low_places) if high[victim] >= is_low else NONE for victim in victims]
    counts = [
        len(high) + come_high - len(victims),
        len(low) + come_low - len(outcasts) + len(fallen) - fallen.count(NONE),
    ]
    empty = [NONE] * (len(leaving) - len(victims))
    return classes, targets, victims + empty, fallen + empty, counts


def _least(means: list[float], limit: float, count: int) -> list[int]:
    """Places of at most ``count`` tokens below ``limit``, least one first, then by place."""
    below = sorted((mean, place) for place, mean in enumerate(means) if mean < limit)
    return [place for _, place in below[:count]]


def _row_means(arena: Tensor, section: Section, slot: int, head: int, now: int) -> list[float]:
    count = int(section.tokens[slot, head])
    pages = section.forward_pages[slot, head][: section.layout.pages(count)]
    seen = torch.tensor([now], device=arena.device)
    return _floats(_mean(arena, section.layout, pages[None], seen).flatten()[:count])


def _floats(row: Tensor) -> list[float]:
    return [float(number) for number in row]


def _mean(arena: Tensor, layout: PageLayout, pages: Tensor, now: Tensor) -> Tensor:
    """Significance of all tokens of some pages: [R, ..., M] pages -> [R, ..., M * T]."""
    parts = segments(arena, layout)
    scores, positions = (part[pages.long()] for part in (parts.scores, parts.positions))
    age = now.view(-1, *(1,) * (positions.dim() - 1)) - positions
    return (scores / age).flatten(-2)
