"""The choice of a method by load: floors, hysteresis, and the direction of the answer."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from triptych.router.policies.method_choice import (
    HOLD_S,
    NEGLIGIBLE_S,
    ROOM,
    SLACK,
    Load,
    Position,
    Rung,
    choose,
    ladder,
)

RUNGS = st.lists(
    st.builds(
        Rung,
        st.uuids().map(str),
        st.floats(0, 1),
        st.integers(1, 1000),
        st.floats(0, 10),
        st.floats(0, 10),
    ),
    min_size=1,
    max_size=6,
).map(ladder)
BYTES, SECONDS = st.integers(0, 10_000), st.floats(0, 100)
LADDER = (Rung("small", 0.02, 100), Rung("middle", 0.005, 200), Rung("large", 0.001, 400))


@given(RUNGS, BYTES, SECONDS, st.floats(0, 1), st.integers(0, 5), SECONDS)
def test_no_choice_is_below_the_floor_and_none_is_much_slower_than_another_that_fits(
    rungs: tuple[Rung, ...], free: int, base_s: float, max_kl: float, at: int, since: float
) -> None:
    before = rungs[at % len(rungs)]
    position = Position(before.method, before.kl, -since)
    found = choose(rungs, Load(free, base_s), position, 0.0, max_kl)
    if any(one.kl <= max_kl for one in rungs):
        assert found.rung.kl <= max_kl
    fresh = choose(rungs, Load(free, base_s), Position(), 0.0).rung
    fitting = [one for one in rungs if one.stored_bytes * ROOM <= free] or [rungs[0]]
    best_s = base_s + min(one.seconds for one in fitting)
    assert base_s + fresh.seconds <= best_s * (1 + SLACK) + NEGLIGIBLE_S + 1e-9
    assert fresh in fitting


@given(RUNGS, BYTES, BYTES, SECONDS, st.floats(0, 1), st.integers(0, 5), SECONDS)
def test_more_free_bytes_never_take_a_lower_rung(
    rungs: tuple[Rung, ...],
    free: int,
    more: int,
    base_s: float,
    max_kl: float,
    at: int,
    since: float,
) -> None:
    before = rungs[at % len(rungs)]
    position = Position(before.method, before.kl, -since)
    few, many = (
        choose(rungs, Load(count, base_s), position, 0.0, max_kl).rung.stored_bytes
        for count in (free, free + more)
    )
    assert few <= many


@given(RUNGS, st.lists(st.tuples(st.floats(0, 2), BYTES, SECONDS), max_size=40))
def test_the_ladder_is_climbed_once_in_a_while_at_most(
    rungs: tuple[Rung, ...], steps: list[tuple[float, int, float]]
) -> None:
    now, position, seen = 0.0, Position(), list[tuple[float, int]]()
    for wait_s, free, base_s in steps:
        now += wait_s
        position = choose(rungs, Load(free, base_s), position, now).position
        methods = [one.method for one in rungs]
        seen.append((now, methods.index(position.method)))
    climbs = [at for (_, before), (at, after) in pairwise(seen) if after > before]
    assert all(late - early >= HOLD_S for early, late in pairwise(climbs))


def test_the_reason_names_what_keeps_the_next_method() -> None:
    def reason(free: int, max_kl: float = 1.0, **seconds: float) -> tuple[str, str]:
        rungs = (*LADDER[:2], Rung("large", 0.001, 400, **seconds))
        found = choose(rungs, Load(free), Position(), 0.0, max_kl)
        return found.rung.method, found.reason

    assert reason(ROOM * 400) == ("large", "quality")
    assert reason(ROOM * 399) == ("middle", "memory")
    assert reason(0) == ("small", "memory")
    assert reason(0, 0.005) == ("middle", "floor")
    assert reason(0, 0.0) == ("large", "floor"), "nothing is near enough: the nearest"
    assert reason(ROOM * 400, transfer_s=1.0) == ("middle", "link")
    assert reason(ROOM * 400, compress_s=1.0) == ("middle", "stages")
    low = choose(LADDER, Load(0), Position(), 0.0).position
    found = choose(LADDER, Load(10_000), low, HOLD_S / 2)
    assert (found.rung.method, found.reason) == ("small", "held")
    assert choose(LADDER, Load(10_000), low, HOLD_S).rung.method == "large"
