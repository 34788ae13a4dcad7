from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from triptych.core.layout import FORMATS, PageLayout, default_page_bytes
from triptych.kernels import plan_retirement
from triptych.kernels.pages import segments

NewCache = Callable[..., Any]
"""``conftest.Cache``."""


def set_scores(arena: Tensor, layout: PageLayout, pages: Tensor, now: int) -> None:
    """Sums that give means around the thresholds, some of them equal."""
    parts = segments(arena, layout)
    shape = (len(pages), layout.tokens)
    means = torch.tensor([0.0, 0.3, 0.9, 1.0, 1.1, 4.0])[torch.randint(0, 6, shape)]
    positions = torch.randint(0, now - 1, shape, dtype=torch.int32)
    parts.positions[pages] = positions
    parts.scores[pages] = means / now * (now - positions)


def check(
    device: Any, new_cache: NewCache, counts: list[list[list[int]]], alphas: tuple[float, float]
) -> None:
    """``counts[kind][slot][head]``: high and low tokens; all integers must be the reference's."""
    cache, now = new_cache(64, pages=120), torch.tensor([5000, 700], dtype=torch.int32)
    stored = [
        cache.fill(name, tokens).section
        for name, tokens in zip(("k8v4", "k4v2"), counts, strict=False)
    ]
    pages = [part.pages[part.pages < 2**30].unique().long() for part in stored]
    free = sorted(set(range(120)) - {int(page) for part in pages for page in part})
    leaving = torch.tensor(free[:4], dtype=torch.int32).view(2, 2)
    raw = PageLayout(FORMATS["fp16"], 64, default_page_bytes(64))
    set_scores(cache.arena, raw, leaving.flatten().long(), 700)
    for section, used in zip(stored, pages, strict=True):
        set_scores(cache.arena, section.layout, used, 700)
    if len(stored) > 1:
        stored[1] = replace(stored[1], pages=stored[1].pages.flip(-1), backward=True)
    slots = torch.tensor([1, 0], dtype=torch.int32)
    options = {"alpha_high": alphas[0], "alpha_low": alphas[1]}
    low = stored[1] if len(stored) > 1 else None
    want = plan_retirement.on("reference")(
        cache.arena, raw, leaving, stored[0], low, slots, now, **options
    )
    moved = [device.section(section) for section in stored]
    arena, leaving, slots, now = device.take(cache.arena, leaving, slots, now)
    low = moved[1] if len(moved) > 1 else None
    got = plan_retirement.on("cuda")(arena, raw, leaving, moved[0], low, slots, now, **options)
    for name, mine, its in zip(want._fields, got, want, strict=True):
        assert mine.dtype == its.dtype
        assert torch.equal(mine.cpu(), its), name


@pytest.mark.parametrize("alphas", [(1.0, 0.3), (3.0, 0.0), (1.0, 1.0), (1e6, 1.0), (0.7, 0.1)])
@pytest.mark.parametrize(
    "counts", [[[[90, 3], [40, 700]], [[200, 0], [7, 55]]], [[[2, 0], [1, 5]], [[1, 3], [0, 2]]]]
)
def test_pages_leave_as_the_reference_says(
    counts: list[list[list[int]]], alphas: tuple[float, float], device: Any, new_cache: NewCache
) -> None:
    check(device, new_cache, counts, alphas)


def test_without_a_low_section_all_is_appended(device: Any, new_cache: NewCache) -> None:
    check(device, new_cache, [[[90, 3], [40, 30]]], (0.0, 0.0))
