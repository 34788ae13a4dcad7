"""How often the bytes of requests that were let in exceed the capacity, against what was asked."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.router.models.overcommit import AHEAD, Need, Overcommit

A_TOKEN = 1000
"""Bytes of a token."""
SIZES = [A_TOKEN * more for more in AHEAD]


def admitted(risk: float, capacity: int, survival: list[float]) -> int:
    """Equal requests that are let in at once."""
    overcommit, need = Overcommit(risk), Need.of(survival, SIZES)
    while overcommit.fits("next", "a", need, capacity):
        overcommit.put(f"r{len(overcommit)}", "a", need)
    return len(overcommit)


@pytest.mark.parametrize("risk", [0.01, 0.05, 0.2])
def test_memory_runs_short_as_often_as_asked_and_hardly_less(risk: float) -> None:
    mean = 300.0
    survival = [2.718281828 ** (-more / mean) for more in AHEAD]
    capacity = 10_000 * A_TOKEN
    count, draw = admitted(risk, capacity, survival), Random(0)
    short, trials = [0] * len(AHEAD), 4000
    for _ in range(trials):
        lengths = [draw.expovariate(1 / mean) for _ in range(count)]
        for at, more in enumerate(AHEAD):
            short[at] += sum(more * A_TOKEN for tokens in lengths if tokens > more) > capacity
    assert 0.5 * risk <= max(short) / trials <= 2 * risk


def test_risk_buys_requests() -> None:
    counts = [admitted(risk, 10**7, [0.5] * len(AHEAD)) for risk in (0.001, 0.05, 0.5)]
    assert counts == sorted(set(counts))


def test_the_only_request_of_an_arena_may_always_start() -> None:
    overcommit, need = Overcommit(0.05), Need.constant(10**9)
    assert overcommit.fits("r", "a", need, 10)
    overcommit.put("r", "a", need)
    assert overcommit.fits("r", "a", need, 10)
    assert not overcommit.fits("q", "a", Need.constant(1), 10)
    assert overcommit.fits("q", "b", need, 10)


NEEDS = st.builds(
    Need.of,
    st.lists(st.floats(0, 1), min_size=len(AHEAD), max_size=len(AHEAD)),
    st.lists(st.integers(0, 10**10), min_size=len(AHEAD), max_size=len(AHEAD)),
)


@given(st.lists(st.tuples(st.sampled_from("pqr"), st.sampled_from("ab"), NEEDS | st.none())))
def test_sums_are_those_of_a_recount(changes: list[tuple[str, str, Need | None]]) -> None:
    overcommit, left = Overcommit(0.1), dict[str, tuple[str, Need]]()
    for request, arena, need in changes:
        if need is None:
            overcommit.drop(request)
            left.pop(request, None)
        else:
            overcommit.put(request, arena, need)
            left[request] = arena, need
    fresh = Overcommit(0.1)
    for request, (arena, need) in left.items():
        fresh.put(request, arena, need)
    assert overcommit._arenas == fresh._arenas
