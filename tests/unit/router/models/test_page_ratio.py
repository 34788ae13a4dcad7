"""The share of their bound that requests hold, learned by profile and length."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.router.models.page_ratio import MOST_PROFILES, PageRatios


def test_without_a_measurement_the_bound_is_the_forecast() -> None:
    assert PageRatios().at("diffkv", 500) == (1.0, 0.0)


def test_mean_and_spread_of_each_length_are_learned() -> None:
    ratios, draw = PageRatios(), Random(0)
    for _ in range(500):
        ratios.note("diffkv", 100, round(1000 * draw.gauss(0.9, 0.02)), 1000)
        ratios.note("diffkv", 2000, round(1000 * draw.gauss(0.5, 0.05)), 1000)
    assert ratios.at("diffkv", 70)[0] == pytest.approx(0.9, abs=0.02)
    mean, deviation = ratios.at("diffkv", 2040)
    assert mean == pytest.approx(0.5, abs=0.03)
    assert deviation == pytest.approx(0.05, abs=0.02)
    assert ratios.at("diffkv", 50_000) == (mean, deviation)
    assert ratios.at("diffkv", 10) == ratios.at("other", 100) == (1.0, 0.0)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 1 << 30), st.floats(0.1, 1.0))),
    st.integers(1, 1 << 30),
)
def test_a_forecast_lies_within_what_was_measured(
    notes: list[tuple[str, int, float]], tokens: int
) -> None:
    ratios = PageRatios()
    for profile, length, share in notes:
        ratios.note(profile, length, round(1e6 * share), 10**6)
    mean, deviation = ratios.at("a", tokens)
    assert min((share for *_, share in notes), default=1.0) - 1e-6 <= mean <= 1.0 + 1e-6
    assert deviation <= 0.5


def test_profiles_without_end_take_bounded_memory() -> None:
    ratios = PageRatios()
    for number in range(2 * MOST_PROFILES):
        ratios.note(f"p{number}", 10, 1, 2)
    assert len(ratios) == MOST_PROFILES
