# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false
# numba is untyped.
"""``plan_retirement`` and ``stored_mass_limits`` on the CPU: passes over scores and positions."""

from collections.abc import Sequence

import numpy as np
import torch
from numba import types
from torch import Tensor

from triptych.core.layout import PageLayout
from triptych.kernels.codegen.kernel_cache import CalledKernels
from triptych.kernels.codegen.numba_runtime import inlined, kernel, prefetch
from triptych.kernels.compact.retire import NONE, Retirement
from triptych.kernels.pages import Section, check_arena, check_indices

UNTRACKED = -1
"""Offset of the scores of pages that have none."""
AHEAD = 4
"""Pages that are prefetched ahead."""
LINE = 64
"""Bytes of a cache line."""


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
    """See ``retire.plan_retirement``."""
    check_indices(slots, now, first_leaving)
    rows = len(slots), high.tokens.shape[1]
    numbers = np.full((*rows, Retirement.width(count)), NONE, np.int32)
    words = arena.numpy().view(np.int32)
    _plan(
        words,
        words.view(np.float32),
        *_table(arena, high),
        *(_table(arena, low) if low is not None else _no_table(high)),
        slots.numpy(),
        now.numpy(),
        first_leaving.numpy(),
        limits.numpy(),
        count,
        numbers,
    )
    return Retirement(torch.from_numpy(numbers))


def stored_mass_limits(
    arena: Tensor,
    classified: Sequence[Section],
    recent: Section,
    slots: Tensor,
    now: Tensor,
    end: Tensor,
    *,
    masses: tuple[float, float],
) -> Tensor:
    """See ``mass.stored_mass_limits``. At most two classes."""
    check_indices(slots, now, end)
    high, low = classified if len(classified) == 2 else (classified[0], None)
    found = np.zeros((len(slots), recent.tokens.shape[1], 2))
    words = arena.numpy().view(np.int32)
    small = arena.view(-1, recent.layout.size_bytes).numpy().view(np.int32)
    _limits(
        words,
        words.view(np.float32),
        small,
        small.view(np.float32),
        *_table(arena, high),
        *(_table(arena, low) if low is not None else _no_table(high)),
        *_table(arena, recent),
        slots.numpy(),
        now.numpy(),
        end.numpy(),
        np.array(masses),
        found,
    )
    return torch.from_numpy(found)


def _table(arena: Tensor, section: Section) -> tuple:
    pages = section.pages.numpy()
    forward = pages[..., ::-1] if section.backward else pages
    return _offsets(arena, section.layout), forward, section.tokens.numpy()


def _no_table(like: Section) -> tuple:
    slots, heads = like.tokens.shape
    no_pages = np.zeros((slots, heads, 1), np.int32)[..., ::-1]
    return np.ones(3, np.int64), no_pages, np.zeros_like(like.tokens)


def _offsets(arena: Tensor, layout: PageLayout) -> np.ndarray:
    """Tokens of a page, and offsets of its scores and positions in words of 4 bytes; these are
    ``UNTRACKED`` if it has none."""
    check_arena(arena, layout)
    if not layout.is_tracked:
        return np.array([layout.tokens, UNTRACKED, UNTRACKED])
    return np.array([layout.tokens, layout.offsets[4] // 4, layout.offsets[5] // 4])


@kernel
def _plan(
    words, numbers,
    high, high_pages, high_tokens, low, low_pages, low_tokens,
    slots, now, first_leaving, limits, count, found,
):  # fmt: skip
    for r in range(len(slots)):
        slot, seen = slots[r], now[r]
        for head in range(found.shape[1]):
            row = words, numbers, high, high_pages[slot, head], high_tokens[slot, head], seen
            low_row = words, numbers, low, low_pages[slot, head], low_tokens[slot, head], seen
            is_high, is_low = limits[r, head]
            _plan_row(row, low_row, first_leaving[r], is_high, is_low, count, found[r, head])


@kernel
def _plan_row(row, low_row, first_leaving, is_high, is_low, wanted, found):
    """Plan one head row into ``found``, in the order of ``Retirement``."""
    n_high, n_low = row[4], low_row[4]
    places, downgraded, downgraded_places = found[2:], found[2 + wanted :], found[2 + 2 * wanted :]
    leaving, means, still_high = _leaving_tokens(
        row, first_leaving, first_leaving + wanted, is_high, is_low
    )
    to_low = 0
    while to_low < len(leaving) and means[to_low] >= is_low:
        to_low += 1
    victims, victim_means = _least(row, first_leaving, is_high, still_high)
    dropped_low, _ = _least(low_row, 2**31 - 1, is_low, to_low)
    count, next_low = 0, 0
    for group in range(2):
        candidates, significance = (leaving, means) if group == 0 else (victims, victim_means)
        for i in range(len(candidates)):
            downgraded[count] = candidates[i]
            if significance[i] >= is_low:
                if next_low < len(dropped_low):
                    downgraded_places[count] = dropped_low[next_low]
                else:
                    downgraded_places[count] = n_low + next_low - len(dropped_low)
                next_low += 1
            count += 1
    for i in range(wanted):
        places[i] = downgraded[i] if i < count else n_high + i - count
    found[0] = n_high + wanted - count
    found[1] = n_low + next_low - len(dropped_low)


@inlined
def _prefetch_page(words, layout, pages, column, count):
    """Prefetch scores and positions of a later page; pages are not adjacent in memory."""
    if column * layout[0] < count:
        page = words.ctypes.data + words.strides[0] * np.int64(pages[column])
        for line in range(0, 4 * layout[0], LINE):
            prefetch(page + 4 * layout[1] + line)
            prefetch(page + 4 * layout[2] + line)


@kernel
def _leaving_tokens(row, first, end, is_high, is_low):
    """Tokens at positions from ``first`` to ``end`` that leave high, those for low first.

    Returns: their places and significance, and how many tokens at these positions stay high
    """
    words, numbers, layout, pages, count, seen = row
    room, scores, positions = layout[0], layout[1], layout[2]
    found, places, means = 0, np.empty(end - first, np.int32), np.empty(end - first, np.float32)
    for start in range(0, count if is_high > 0 else 0, room):
        page = pages[start // room]
        _prefetch_page(words, layout, pages, start // room + AHEAD, count)
        for token in range(min(room, count - start)):
            position = words[page, positions + token]
            if first <= position < end:
                places[found] = start + token
                means[found] = numbers[page, scores + token] / np.float32(seen - position)
                found += 1
    order = np.empty(found, np.int64)
    leaving = 0
    for wants_low in range(1, -1, -1):
        for i in range(found):
            if means[i] < is_high and (means[i] >= is_low) == (wants_low == 1):
                order[leaving] = i
                leaving += 1
    order = order[:leaving]
    return places[order], means[order], found - leaving


@kernel
def _least(row, end, limit, wanted):
    """At most ``wanted`` tokens before position ``end`` below ``limit``, in ascending order.

    None of those that are not tracked.
    """
    words, numbers, layout, pages, count, seen = row
    if layout[1] == UNTRACKED:
        wanted = 0
    room, scores, positions = layout[0], layout[1], layout[2]
    places, means, found = np.empty(wanted, np.int32), np.empty(wanted, np.float32), 0
    for start in range(0, count if wanted > 0 and limit > 0 else 0, room):
        page = pages[start // room]
        _prefetch_page(words, layout, pages, start // room + AHEAD, count)
        for token in range(min(room, count - start)):
            position = words[page, positions + token]
            mean = np.float32(numbers[page, scores + token] / np.float32(seen - position))
            below = position < end and mean < limit
            if below and (found < wanted or mean < means[found - 1]):
                found = min(found + 1, wanted)
                at = found - 1
                while at > 0 and means[at - 1] > mean:
                    places[at], means[at] = places[at - 1], means[at - 1]
                    at -= 1
                places[at], means[at] = start + token, mean
    return places[:found], means[:found]


_WORDS, _INDICES = types.int32[:, ::1], types.int32[::1]
_TABLE = types.int64[::1], types.int32[:, :, ::1], types.int32[:, ::1]

CALLS = CalledKernels(*(
    (
        _plan,
        (
            _WORDS, types.float32[:, ::1], *_TABLE, types.int64[::1], low, types.int32[:, ::1],
            *[_INDICES] * 3, types.float64[:, :, ::1], types.int64, types.int32[:, :, ::1],
        ),
    )
    for low in (types.int32[:, :, ::1], types.int32[:, :, :])
))  # fmt: skip
"""How ``plan_retirement`` calls its kernel; low pages are listed from the left or the right."""


@kernel
def _limits(
    words, numbers, small, small_numbers,
    high, high_pages, high_tokens, low, low_pages, low_tokens, recent, recent_pages, recent_tokens,
    slots, now, end, masses, found,
):  # fmt: skip
    for r in range(len(slots)):
        slot, seen = slots[r], now[r]
        for head in range(found.shape[1]):
            count = high_tokens[slot, head] + low_tokens[slot, head]
            means = np.empty(count, np.float32)
            row = words, numbers, high, high_pages[slot, head], high_tokens[slot, head], seen
            total, kept = _collect(row, end[r], means, 0, 0.0)
            row = words, numbers, low, low_pages[slot, head], low_tokens[slot, head], seen
            total, kept = _collect(row, end[r], means, kept, total)
            pages, tokens = recent_pages[slot, head], recent_tokens[slot, head]
            row = small, small_numbers, recent, pages, tokens, seen
            total, _none = _collect(row, -1, means, kept, total)
            ordered = np.sort(means[:kept])
            for part in range(len(masses)):
                if masses[part] > 0 and kept > 0:
                    found[r, head, part] = _limit_of(ordered, masses[part] * total)


@inlined
def _limit_of(ordered, wanted):
    """The first number up to which the sum reaches ``wanted``, or infinity."""
    running, at = 0.0, 0
    while at < len(ordered):
        running += np.float64(ordered[at])
        if running >= wanted:
            break
        at += 1
    return np.float64(ordered[at]) if at < len(ordered) else np.inf


@inlined
def _collect(row, end, means, kept, total):
    """Append the significance of tokens before ``end`` to ``means``, and add that of all."""
    words, numbers, layout, pages, count, seen = row
    room, scores, positions = layout[0], layout[1], layout[2]
    for start in range(0, count, room):
        page = pages[start // room]
        for token in range(min(room, count - start)):
            position = words[page, positions + token]
            mean = numbers[page, scores + token] / np.float32(seen - position)
            total += np.float64(mean)
            if position < end:
                means[kept] = mean
                kept += 1
    return total, kept
