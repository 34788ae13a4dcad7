"""Tests of ``plan_eviction`` against H2O's policy by hand, and of its fast version."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from triptych.kernels import Retirement, Section, plan_eviction
from triptych.kernels.pages import segments

BACKENDS = [name for name in plan_eviction.backends if name != "cuda"]
NewCache = Callable[..., Any]
"""``conftest.Cache``."""


def set_scores(arena: Tensor, section: Section, scores: Sequence[float]) -> None:
    """Set the scores of the tokens of the first head row, in the order of their places."""
    per_page = section.layout.tokens
    for place, score in enumerate(scores):
        page = int(section.pages[0, 0, place // per_page])
        segments(arena, section.layout).scores[page, place % per_page] = score


def plan(
    backend: str, arena: Tensor, high: Section, low: Section | None, *rows: int, count: int
) -> Retirement[Tensor]:
    """The plan of one slot; ``rows``: its budget, and the first of its newest tokens."""
    slot, most, newest = (torch.tensor([number], dtype=torch.int32) for number in (0, *rows))
    return plan_eviction.on(backend)(arena, high, low, slot, most, newest, count=count)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_tokens_with_the_least_attention_go_whatever_their_age(
    backend: str, new_cache: NewCache
) -> None:
    """Six tokens at 0 to 5, a budget of seven, three new ones: two go. Token 4 has least attention
    of all, but is among the newest; of the others 3 and then 1 have least."""
    cache = new_cache(64, pages=20)
    high = cache.fill("k8v4", [[6]]).section
    set_scores(cache.arena, high, [5.0, 0.4, 3.0, 0.3, 0.1, 2.0])
    found = plan(backend, cache.arena, high, None, 7, 4, count=3)
    assert found.places.tolist() == [[[3, 1, 6]]]
    assert found.downgraded.tolist() == [[[3, 1, -1]]]
    assert found.downgraded_places.tolist() == [[[-1, -1, -1]]], "they are dropped, not lowered"
    assert found.counts.tolist() == [[[7, 0]]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_newest_tokens_go_last_and_the_oldest_of_them_first(
    backend: str, new_cache: NewCache
) -> None:
    cache = new_cache(64, pages=20)
    high = cache.fill("k8v4", [[4]]).section
    set_scores(cache.arena, high, [1.0, 0.1, 0.2, 0.3])
    found = plan(backend, cache.arena, high, None, 4, 1, count=3)
    assert found.downgraded.tolist() == [[[0, 1, 2]]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_low_tokens_count_and_rows_below_their_budget_grow(
    backend: str, new_cache: NewCache
) -> None:
    cache = new_cache(64, pages=20)
    high, low = (cache.fill(name, [[5]]).section for name in ("k8v4", "k4v2"))
    set_scores(cache.arena, high, [5.0, 4.0, 3.0, 2.0, 1.0])
    assert plan(backend, cache.arena, high, low, 100, 5, count=4).counts.tolist() == [[[9, 5]]]
    found = plan(backend, cache.arena, high, low, 12, 5, count=4)
    assert found.counts.tolist() == [[[7, 5]]]
    assert found.downgraded.tolist() == [[[4, 3, -1, -1]]]
    assert plan(backend, cache.arena, high, low, 0, 5, count=4).counts.tolist() == [[[5, 5]]]


def test_dropping_several_at_once_is_dropping_one_before_each_new_token(
    new_cache: NewCache,
) -> None:
    """H2O token after token, transcribed: new tokens have received no attention and are new."""
    cache = new_cache(64, pages=60)
    high = cache.fill("k8v4", [[70]]).section
    scores = torch.rand(70).tolist()
    set_scores(cache.arena, high, scores)
    kept = dict(enumerate(scores))
    for _ in range(13):
        old = [position for position in kept if position < 50]
        del kept[min(old, key=lambda position: kept[position])]
    found = plan("reference", cache.arena, high, None, 70, 50, count=13)
    dropped = found.downgraded.flatten().tolist()
    assert sorted(set(range(70)) - set(dropped)) == sorted(kept)


@pytest.mark.parametrize("count", [1, 13, 24])
def test_the_fast_version_gives_the_integers_of_the_reference(
    count: int, new_cache: NewCache
) -> None:
    """Many rows of unlike lengths, some empty, and scores that are equal."""
    cache = new_cache(64, pages=400)
    high = cache.fill("k8v4", [[90, 3], [40, 700], [0, 33]]).section
    low = cache.fill("k4v2", [[20, 0], [7, 55], [0, 0]]).section
    used = high.pages[high.pages < 2**30].unique().long()
    scores = segments(cache.arena, high.layout).scores
    scores[used] = torch.randint(0, 9, scores[used].shape).float()
    slots, most, newest = (
        torch.tensor(numbers, dtype=torch.int32)
        for numbers in ([2, 0, 1], [20, 60, 300], [10, 50, 400])
    )
    for section in (low, None):
        want, got = (
            plan_eviction.on(backend)(
                cache.arena, high, section, slots, most, newest, count=count
            ).numbers
            for backend in BACKENDS
        )
        assert got.dtype == want.dtype
        assert torch.equal(got, want)
