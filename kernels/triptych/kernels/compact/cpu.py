# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false
# numba is untyped.
"""Planning on the CPU: one sweep over scores and positions, straight from the pages."""

import numpy as np
import torch
from torch import Tensor

from triptych.core.layout import PageLayout
from triptych.kernels.compact.reference import DROPPED, HIGH, LOW
from triptych.kernels.compact.retire import NONE, Retirement
from triptych.kernels.compiled import kernel
from triptych.kernels.pages import Section, check_arena, check_indices


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
    """See ``retire.plan_retirement``."""
    check_indices(leaving, slots, now)
    shape = *leaving.shape, raw.tokens
    classes = np.empty(shape, np.uint8)
    targets, victims, fallen = (np.full(shape, NONE, np.int32) for _ in range(3))
    counts = np.empty((*leaving.shape, 2), np.int32)
    words = arena.numpy().view(np.int32)
    _plan(
        words,
        words.view(np.float32),
        _places(arena, raw),
        leaving.numpy(),
        *_table(arena, high),
        *(_table(arena, low) if low is not None else _no_table(high)),
        slots.numpy(),
        now.numpy(),
        alpha_high,
        alpha_low,
        classes,
        targets,
        victims,
        fallen,
        counts,
    )
    return Retirement(*map(torch.from_numpy, (classes, targets, victims, fallen, counts)))


def _table(arena: Tensor, section: Section) -> tuple:
    places = _places(arena, section.layout)
    pages = section.pages.numpy()
    return places, pages[..., ::-1] if section.backward else pages, section.tokens.numpy()


def _no_table(like: Section) -> tuple:
    slots, heads = like.tokens.shape
    return np.zeros(3, np.int64), np.zeros((slots, heads, 0), np.int32), np.zeros_like(like.tokens)


def _places(arena: Tensor, layout: PageLayout) -> np.ndarray:
    """Tokens of a page, and where its scores and positions start, in words of 4 bytes."""
    check_arena(arena, layout)
    return np.array([layout.tokens, layout.offsets[4] // 4, layout.offsets[5] // 4])


@kernel
def _plan(
    words, numbers, raw, leaving,
    high, high_pages, high_tokens, low, low_pages, low_tokens,
    slots, now, alpha_high, alpha_low,
    classes, targets, victims, fallen, counts,
):  # fmt: skip
    for r in range(leaving.shape[0]):
        slot, seen = slots[r], now[r]
        is_high, is_low = min(1.0, alpha_high / seen), min(1.0, alpha_low / seen)
        for head in range(leaving.shape[1]):
            kinds, wanted = classes[r, head], np.zeros(3, np.int64)
            for token in range(raw[0]):
                mean = _mean_of(words, numbers, leaving[r, head], raw, token, seen)
                kinds[token] = HIGH if mean >= is_high else LOW if mean >= is_low else DROPPED
                wanted[kinds[token]] += 1
            n_high, n_low = high_tokens[slot, head], low_tokens[slot, head]
            step_down, means = _least(
                words, numbers, high, high_pages[slot, head], n_high, seen, is_high, wanted[HIGH]
            )
            drop_out, _ = _least(
                words, numbers, low, low_pages[slot, head], n_low, seen, is_low, wanted[LOW]
            )
            next_high = next_low = 0
            for token in range(raw[0]):
                if kinds[token] == HIGH:
                    targets[r, head, token] = _place(step_down, n_high, next_high)
                    next_high += 1
                elif kinds[token] == LOW:
                    targets[r, head, token] = _place(drop_out, n_low, next_low)
                    next_low += 1
            for i in range(len(step_down)):
                victims[r, head, i] = step_down[i]
                if means[i] >= is_low:
                    fallen[r, head, i] = _place(drop_out, n_low, next_low)
                    next_low += 1
            counts[r, head, 0] = n_high + next_high - len(step_down)
            counts[r, head, 1] = n_low + next_low - len(drop_out)


@kernel
def _place(free, count, index):
    """Where the ``index``-th newcomer goes: into a free place, else behind the list."""
    return free[index] if index < len(free) else count + index - len(free)


@kernel
def _least(words, numbers, layout, pages, count, seen, limit, wanted):
    """Places and means of at most ``wanted`` tokens below ``limit``, the least first."""
    places, means, found = np.empty(wanted, np.int32), np.empty(wanted, np.float32), 0
    if wanted > 0 and limit > 0:
        for place in range(count):
            page, token = pages[place // layout[0]], place % layout[0]
            mean = _mean_of(words, numbers, page, layout, token, seen)
            if mean < limit and (found < wanted or mean < means[found - 1]):
                found = min(found + 1, wanted)
                at = found - 1
                while at > 0 and means[at - 1] > mean:
                    places[at], means[at] = places[at - 1], means[at - 1]
                    at -= 1
                places[at], means[at] = place, mean
    return places[:found], means[:found]


@kernel
def _mean_of(words, numbers, page, layout, token, seen):
    """Significance of one token: its score over the tokens that came since."""
    age = seen - words[page, layout[2] + token]
    return np.float32(numbers[page, layout[1] + token] / np.float32(age))
