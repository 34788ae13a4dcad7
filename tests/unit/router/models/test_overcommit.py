"""How often the bytes of requests that were let in exceed the capacity, against what was asked."""

from math import comb, exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.router.models.overcommit import AHEAD, Need, Overcommit

A_TOKEN, CAPACITY = 1000, 10**7
"""Bytes of a token, and of an arena."""
SIZES = [A_TOKEN * more for more in AHEAD]


def admitted(risk: float, capacity: int, survival: list[float]) -> int:
    """Equal requests that are let in at once."""
    overcommit, need = Overcommit(risk, capacity), Need.of(survival, SIZES, capacity)
    while overcommit.fits("next", "a", need, capacity):
        overcommit.put(f"r{len(overcommit)}", "a", need)
    return len(overcommit)


def chance_of_more(running: int, survival: float, fitting: int) -> float:
    """Probability that more than ``fitting`` of equal requests still run (binomial)."""
    return sum(
        comb(running, many) * survival**many * (1 - survival) ** (running - many)
        for many in range(fitting + 1, running + 1)
    )


@pytest.mark.parametrize("tokens", [4000, 10_000, 40_000])
@pytest.mark.parametrize("risk", [0.0001, 0.001, 0.01, 0.05, 0.2])
def test_memory_runs_short_as_often_as_asked_and_hardly_less(risk: float, tokens: int) -> None:
    """Few large requests and many: a normal sum of the few would be short ten times as often."""
    survival = [exp(-more / 300) for more in AHEAD]
    count = admitted(risk, tokens * A_TOKEN, survival)
    short = max(
        chance_of_more(count, share, tokens // more)
        for share, more in zip(survival, AHEAD, strict=True)
    )
    assert 0.2 * risk <= short <= 2 * risk


def test_requests_that_fit_whatever_happens_all_start() -> None:
    """Three of a third of the memory each, which run or end as a coin falls."""
    sizes, survival = [10**6] * len(AHEAD), [0.5] * len(AHEAD)
    overcommit, need = Overcommit(1e-4, 3_200_000), Need.of(survival, sizes, 3_200_000)
    for name in ("p", "q"):
        overcommit.put(name, "a", need)
    assert overcommit.fits("r", "a", need, 3_200_000)
    overcommit.put("r", "a", need)
    assert not overcommit.fits("s", "a", need, 3_200_000)


def test_risk_and_lent_memory_buy_requests() -> None:
    survival = [exp(-more / 300) for more in AHEAD]
    counts = [admitted(risk, CAPACITY, survival) for risk in (0.001, 0.05, 0.5)]
    assert counts == sorted(set(counts))
    overcommit, need = Overcommit(0.01, CAPACITY), Need.of(survival, SIZES, CAPACITY)
    overcommit.put("r", "a", need)
    assert overcommit.room("a", need, 2 * CAPACITY, 99) > overcommit.room("a", need, CAPACITY, 99)


@given(st.sampled_from([0.001, 0.05]), st.integers(1_000, 30_000), st.integers(100, 1000))
def test_room_is_the_number_of_requests_that_fit(risk: float, tokens: int, mean: int) -> None:
    survival, capacity = [exp(-more / mean) for more in AHEAD], tokens * A_TOKEN
    overcommit, need = Overcommit(risk, capacity), Need.of(survival, SIZES, capacity)
    assert overcommit.room("a", need, capacity, 2000) == admitted(risk, capacity, survival)


def test_the_only_request_of_an_arena_may_always_start() -> None:
    overcommit, need = Overcommit(0.05, 10), Need.constant(10**9, 10)
    assert overcommit.fits("r", "a", need, 10)
    overcommit.put("r", "a", need)
    assert overcommit.fits("r", "a", need, 10)
    assert not overcommit.fits("q", "a", Need.constant(1, 10), 10)
    assert overcommit.fits("q", "b", need, 10)


NEEDS = st.builds(
    Need.of,
    st.lists(st.floats(0, 1), min_size=len(AHEAD), max_size=len(AHEAD)),
    st.lists(st.integers(0, 10**10), min_size=len(AHEAD), max_size=len(AHEAD)),
    st.just(CAPACITY),
)


@given(st.lists(st.tuples(st.sampled_from("pqr"), st.sampled_from("ab"), NEEDS | st.none())))
def test_sums_are_those_of_a_recount(changes: list[tuple[str, str, Need | None]]) -> None:
    overcommit, left = Overcommit(0.1, CAPACITY), dict[str, tuple[str, Need]]()
    for request, arena, need in changes:
        if need is None:
            overcommit.drop(request)
            left.pop(request, None)
        else:
            overcommit.put(request, arena, need)
            left[request] = arena, need
    fresh = Overcommit(0.1, CAPACITY)
    for request, (arena, need) in left.items():
        fresh.put(request, arena, need)
    assert overcommit._arenas == fresh._arenas


@given(st.lists(NEEDS, min_size=1, max_size=12), st.integers(1, 3 * CAPACITY), st.booleans())
def test_what_is_certain_to_fit_fits(needs: list[Need], memory: int, waits: bool) -> None:
    overcommit = Overcommit(0.05, CAPACITY)
    for number, need in enumerate(needs[: len(needs) if waits else -1]):
        overcommit.forecast(str(number), "a", need.most_bytes, lambda need=need: need)
    last, need = str(len(needs) - 1), needs[-1]
    if overcommit.is_certain(last, "a", need.most_bytes, memory):
        assert overcommit.fits(last, "a", need, memory)
