"""Ways to move the same bytes, measured in turns, next to the plain way."""

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
    """What the seconds of each turn come to; the last way is the plain one."""
    *_, plain = took_s.values()
    rows = list[Rate]()
    for name, times in took_s.items():
        each = [nbytes / s / 1e9 for s in times]
        low, middle, high = (round(x, 3) for x in statistics.quantiles(each, n=4))
        ratio = statistics.median(p / s for s, p in zip(times, plain, strict=True))
        rows.append(Rate(name, middle, low, high, round(ratio, 2)))
    return rows
