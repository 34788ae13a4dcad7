"""``plan_eviction`` for all head rows at once: a few torch operations on any device."""

import torch
from torch import Tensor

from triptych.kernels.compact.retire import NONE, Retirement
from triptych.kernels.pages import Section, check_arena, check_indices, segments

OLD, NEW, NOTHING = 0, 1, 2
"""Tokens that go first, those that go last, and places without one."""


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
    """See ``evict.plan_eviction``: the same integers. All pages of the high table are read, up to
    the width of ``high.pages``: the host does not wait for token counts.
    """
    check_indices(slots, most, newest)
    check_arena(arena, high.layout)
    at = slots.long()
    stored = high.tokens[at].long()
    lower = low.tokens[at].long() if low is not None else torch.zeros_like(stored)
    excess = stored + lower + count - most.long()[:, None]
    dropped = excess.clamp(min=0, max=count).minimum(stored)[..., None]
    order = _order(arena, high, at, stored, newest)
    token = torch.arange(count, device=arena.device)
    first = torch.nn.functional.pad(order, (0, count))[..., :count]
    goes = token < dropped
    places = torch.where(goes, first, stored[..., None] + token - dropped)
    counts = torch.stack((stored + count - dropped[..., 0], lower), -1)
    none = torch.full_like(places, NONE)
    numbers = torch.cat((counts, places, torch.where(goes, first, none), none), -1)
    return Retirement(numbers.int())


def _order(arena: Tensor, high: Section, at: Tensor, stored: Tensor, newest: Tensor) -> Tensor:
    """Places of the high tokens of each row in the order in which they go, [R, KH, N]."""
    layout, width = high.layout, high.pages.shape[-1]
    place = torch.arange(width * layout.tokens, device=arena.device)
    used = torch.arange(width, device=arena.device) < -(-stored // layout.tokens)[..., None]
    pages = torch.where(used, high.forward_pages[at], 0).long()
    parts = segments(arena, layout)
    positions, scores = (part[pages].flatten(2) for part in (parts.positions, parts.scores))
    is_new = positions >= newest[:, None, None]
    group = torch.where(is_new, NEW, OLD).masked_fill(place >= stored[..., None], NOTHING)
    values = torch.where(is_new, positions.double(), scores.double())
    order = values.masked_fill(group == NOTHING, 0.0).argsort(dim=-1, stable=True)
    return order.gather(-1, group.gather(-1, order).argsort(dim=-1, stable=True))
