"""TinyServe's latency model: what a fit finds, what it predicts, and the best page size."""

import random

import pytest

from triptych.core.errors import ConfigError
from triptych.kernels.bench.attention_cpu import page_bytes_of
from triptych.kernels.bench.latency_model import LatencyModel, SelectionPoint, fit, fit_and_check
from triptych.kernels.bench.selection import run_selection

MODEL = LatencyModel(fixed_us=3.0, page_us=0.05, token_us=0.01)


def points(noise: float = 0.0) -> list[SelectionPoint]:
    luck = random.Random(4)
    return [
        SelectionPoint(pages, tokens, MODEL.predict(pages, tokens) * luck.uniform(1, 1 + noise))
        for pages in (64, 256, 1024, 4096)
        for tokens in (300, 1200, 5000, 20_000)
    ]


def test_a_fit_finds_the_coefficients_of_exact_times() -> None:
    found = fit(points())
    assert found.fixed_us == pytest.approx(3.0)
    assert found.page_us == pytest.approx(0.05)
    assert found.token_us == pytest.approx(0.01)


def test_times_that_the_fit_does_not_know_are_predicted_within_their_noise() -> None:
    found, error, held = fit_and_check(points(noise=0.1))
    assert held == 6
    assert error < 0.05
    assert found.token_us == pytest.approx(0.01, rel=0.1)
    with pytest.raises(ConfigError, match="3 coefficients to 2 points"):
        fit_and_check(points()[:3])


def test_no_coefficient_is_negative() -> None:
    """Times that fall with the number of pages: summaries then cost nothing."""
    falling = [SelectionPoint(pages, 1000, 20.0 - pages / 1000) for pages in (10, 500, 4000)]
    falling.append(SelectionPoint(100, 2000, 35.0))
    found = fit(falling)
    assert min(found.fixed_us, found.page_us, found.token_us) >= 0
    assert found.page_us == 0


@pytest.mark.parametrize("chosen", [4, 30, 200])
@pytest.mark.parametrize("context", [2048, 32_768])
def test_the_best_page_size_is_within_a_step_of_the_least_of_a_grid(
    context: int, chosen: int
) -> None:
    best = MODEL.best_page_tokens(context, chosen)
    sizes = [2**step for step in range(12)]
    times = [MODEL.predict(context // size, chosen * size) for size in sizes]
    least = sizes[times.index(min(times))]
    assert least / 2 <= best <= 2 * least
    value = MODEL.fixed_us + 2 * (MODEL.page_us * MODEL.token_us * context * chosen) ** 0.5
    assert min(times) >= value
    free = LatencyModel(fixed_us=1.0, page_us=1.0, token_us=0.0)
    assert free.best_page_tokens(context, chosen) == float("inf")


def test_a_measured_page_has_as_many_tokens_as_was_asked_for() -> None:
    rows = run_selection(["cpu"], ["moments"], ["k8v4"], [1], [512], [0.5], [], [16, 32], repeats=1)
    assert [row.page_tokens for row in rows] == [16, 32]
    assert [row.pages for row in rows] == [3 * 32, 3 * 16]
    assert all(0.5 * 3 * 512 <= row.tokens_read <= 0.55 * 3 * 512 for row in rows)
    assert page_bytes_of("k8v4", 64, 32) == 3584
