"""Alternating measurement of several ways to move the same bytes, relative to a plain copy."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Rate:
    """One way to move the bytes."""

    what: str
    gb_per_s: float
    """Median."""
    low: float
    high: float
    """Quartiles."""
    against_plain: float
    """Median over the turns of its rate over that of the plain way in the same turn."""


def timed(way: Callable[[], object]) -> float:
    """Seconds that it takes."""
    begun = time.perf_counter()
    way()
    return time.perf_counter() - begun


def rates(took_s: dict[str, list[float]], nbytes: int) -> list[Rate]:
    """Rates from the seconds of each round; the last way is the plain copy."""
    *_, plain = took_s.values()
    rows = list[Rate]()
    for name, times in took_s.items():
        each = [nbytes / s / 1e9 for s in times]
        low, middle, high = (round(x, 3) for x in statistics.quantiles(each, n=4))
        ratio = statistics.median(p / s for s, p in zip(times, plain, strict=True))
        rows.append(Rate(name, middle, low, high, round(ratio, 2)))
    return rows
