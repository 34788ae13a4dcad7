"""Retry-After from the rate at which the line moved."""

from hypothesis import given
from hypothesis import strategies as st

from triptych.router.models.retry_after import (
    MAX_RETRY_S,
    MIN_RETRY_S,
    UNKNOWN_RETRY_S,
    WINDOW_S,
    DrainRate,
)


def moved(*times: float) -> DrainRate:
    rate = DrainRate()
    for time in times:
        rate.note(time)
    return rate


def test_a_line_that_never_moved_gives_a_fixed_answer() -> None:
    assert DrainRate().retry_after_s(100, 5.0) == UNKNOWN_RETRY_S


def test_two_a_second_clear_ten_waiting_in_five_seconds() -> None:
    assert moved(*(0.5 * i for i in range(20))).retry_after_s(10, 10.0) == 5.0


def test_a_line_that_stands_still_says_longer_and_longer() -> None:
    rate = moved(0.0, 1.0)
    assert rate.retry_after_s(4, 2.0) < rate.retry_after_s(4, 8.0)
    assert rate.retry_after_s(4, 2 + WINDOW_S) == MAX_RETRY_S


@given(
    times=st.lists(st.floats(0, 100), min_size=1).map(sorted),
    waiting=st.integers(0, 10_000),
    later=st.floats(0, 100),
)
def test_the_answer_is_always_within_bounds(times: list[float], waiting: int, later: float) -> None:
    answer = moved(*times).retry_after_s(waiting, times[-1] + later)
    assert MIN_RETRY_S <= answer <= MAX_RETRY_S
