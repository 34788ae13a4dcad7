"""TinyServe's model of the time of attention with page selection, fitted to measured calls.

A call scores the summaries of P pages and reads the tokens of K pages of S tokens, so it takes
``fixed + page P + token K S``. The paper has two coefficients of K S, for memory and for
arithmetic; they cannot be told apart by times, so one stands for both.

Source: TinyServe, section 3.6 (latency model, optimal page size). Its optimum is that of equal
        coefficients, and has no place for the fixed part
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import mean

import numpy as np

from triptych.core.errors import ConfigError

HELD_OUT = 3
"""Every so many points, the first is left out of the fit and predicted by it."""
COEFFICIENTS = 3


@dataclass(frozen=True, slots=True)
class SelectionPoint:
    """One measured call of selection and attention."""

    pages: int
    """Pages whose summaries are scored, of all head rows."""
    tokens: int
    """Tokens that attention reads, of all head rows."""
    us: float


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """Microseconds of a call of selection and attention.

    >>> model = LatencyModel(fixed_us=1.0, page_us=0.04, token_us=0.01)
    >>> model.predict(pages=100, tokens=500)
    10.0
    >>> model.best_page_tokens(context=4096, chosen=64)
    16.0
    """

    fixed_us: float
    page_us: float
    """Of a summary that is scored."""
    token_us: float
    """Of a token that is read."""

    def predict(self, pages: int, tokens: int) -> float:
        return self.fixed_us + self.page_us * pages + self.token_us * tokens

    def best_page_tokens(self, context: int, chosen: int) -> float:
        """Tokens of a page with which a row of ``context`` tokens takes the least time if
        ``chosen`` pages of it are read; infinity if reading tokens takes no time.

        With S tokens ``context / S`` summaries are scored and ``chosen S`` tokens read, so the
        least is where both take the same time. A share of the pages instead of a number has no
        least: larger pages are always faster, and lose more.
        """
        reads = self.token_us * chosen
        return sqrt(self.page_us * context / reads) if reads > 0 else float("inf")

    def error(self, points: Sequence[SelectionPoint]) -> float:
        """Mean absolute error relative to the measured times."""
        return mean(abs(self.predict(one.pages, one.tokens) / one.us - 1) for one in points)


def fit(points: Sequence[SelectionPoint]) -> LatencyModel:
    """The model with the least squares of relative errors; no coefficient is negative.

    Raises: ConfigError with fewer points than coefficients
    """
    if len(points) < COEFFICIENTS:
        raise ConfigError(f"a fit of {COEFFICIENTS} coefficients to {len(points)} points")
    times = np.array([one.us for one in points])
    parts = np.array([[1.0, one.pages, one.tokens] for one in points]) / times[:, None]
    used, found = list(range(COEFFICIENTS)), np.zeros(COEFFICIENTS)
    while used:
        solved = np.linalg.lstsq(parts[:, used], np.ones(len(points)), rcond=None)[0]
        if (solved >= 0).all():
            found[used] = solved
            break
        used.pop(int(solved.argmin()))
    return LatencyModel(*(float(one) for one in found))


def fit_and_check(points: Sequence[SelectionPoint]) -> tuple[LatencyModel, float, int]:
    """A model of two thirds of the points, its error on the others, and their number.

    Raises: ConfigError if too few are left to fit
    """
    held = points[::HELD_OUT]
    used = [one for index, one in enumerate(points) if index % HELD_OUT]
    model = fit(used)
    return model, model.error(held), len(held)
