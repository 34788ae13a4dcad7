from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.moves import UNTRACKED
from triptych.core.layout import PageLayout
from triptych.kernels import plan_retirement
from triptych.kernels.pages import segments

NewCache = Callable[..., Any]
"""``conftest.Cache``."""


def set_scores(arena: Tensor, layout: PageLayout, pages: Tensor, now: int) -> None:
    """Scores with means around the thresholds, some of them equal."""
    scores, positions = segments(arena, layout).scores, segments(arena, layout).positions
    means = torch.tensor([0.0, 0.3, 0.9, 1.0, 1.1, 4.0])[torch.randint(0, 6, scores.shape)]
    scores[pages] = (means / now * (now - positions))[pages]


def check(
    device: Any,
    new_cache: NewCache,
    counts: list[list[list[int]]],
    alphas: tuple[float, float],
    low_name: str = "k4v2",
) -> None:
    """Compare all integers of a plan to the reference; ``counts[kind][slot][head]``: tokens."""
    cache, now = new_cache(64, pages=120), torch.tensor([900, 800], dtype=torch.int32)
    first_leaving = torch.tensor([3, 60], dtype=torch.int32)
    stored = [
        cache.fill(name, tokens).section
        for name, tokens in zip(("k8v4", low_name), counts, strict=False)
    ]
    for section in (one for one in stored if one.layout.is_tracked):
        used = section.pages[section.pages < 2**30].unique().long()
        set_scores(cache.arena, section.layout, used, 800)
    if len(stored) > 1:
        stored[1] = replace(stored[1], pages=stored[1].pages.flip(-1), backward=True)
    slots = torch.tensor([1, 0], dtype=torch.int32)
    scales = torch.tensor([1.0, 1.4], dtype=torch.float64)
    limits = torch.tensor(alphas, dtype=torch.float64) * scales[:, None] / now[:, None, None]
    limits, options = limits.clamp(max=1.0), {"count": 13}
    low = stored[1] if len(stored) > 1 else None
    want = plan_retirement.on("reference")(
        cache.arena, stored[0], low, slots, now, first_leaving, limits, **options
    )
    moved = [device.section(section) for section in stored]
    inputs = device.take(slots, now, first_leaving, limits)
    (arena,) = device.take(cache.arena)
    low = moved[1] if len(moved) > 1 else None
    got = plan_retirement.on("cuda")(arena, moved[0], low, *inputs, **options)
    assert got.numbers.dtype == want.numbers.dtype
    for name in ("counts", "places", "downgraded", "downgraded_places"):
        assert torch.equal(getattr(got, name).cpu(), getattr(want, name)), name


MANY = [[[90, 3], [40, 700]], [[200, 0], [7, 55]]]
FEW = [[[2, 0], [1, 5]], [[1, 3], [0, 2]]]


@pytest.mark.parametrize("alphas", [(1.0, 0.3), (3.0, 0.0), (1.0, 1.0), (1e6, 1.0), (0.7, 0.1)])
@pytest.mark.parametrize("counts", [MANY, FEW])
def test_retirement_plans_equal_those_of_the_reference(
    counts: list[list[list[int]]], alphas: tuple[float, float], device: Any, new_cache: NewCache
) -> None:
    check(device, new_cache, counts, alphas)


@pytest.mark.parametrize("alphas", [(3.0, 0.0), (1.0, 0.3)])
def test_low_tokens_that_are_not_tracked_stay(
    alphas: tuple[float, float], device: Any, new_cache: NewCache
) -> None:
    check(device, new_cache, MANY, alphas, UNTRACKED)


def test_without_a_low_section_new_tokens_are_appended(device: Any, new_cache: NewCache) -> None:
    check(device, new_cache, [[[90, 3], [40, 30]]], (0.0, 0.0))
