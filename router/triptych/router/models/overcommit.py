"""Overcommit: whether the bytes that running requests will need probably fit.

A request needs its pages as long as it runs, and they grow with each token. Its bytes in ``t``
tokens from now are a random variable: those of its length then, if it still runs, else none.
Requests end independently of each other, so the probability that all together need more than the
capacity ``C`` is at most ``exp(sum of log E[exp(a * bytes / C)] - a)`` for each ``a > 0``
(Chernoff's bound). It is computed at each of ``AHEAD`` for each of ``EXPONENTS``, and the least
over all ``a`` follows from those. Unlike a normal distribution it is right about the sum of a few
large requests, and about requests that fit whatever happens. Logarithms add up, so a request costs
a sum.

The bound of a normal sum at the quantile of the risk is what it is compared with. So the risk is
exact for many requests; the bound itself would be about ten times too careful.

Source: Chernoff 1952; Hui 1988, effective bandwidths: the same rule for connections that share a
        link. The need over the tokens ahead is ours.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import expm1, log1p
from statistics import NormalDist

AHEAD = (24, 96, 256, 640, 1600, 4096)
"""Numbers of tokens from now at which the need is forecast: the horizon is the last one."""
EXPONENTS = (6.0, 10.0, 18.0, 36.0, 90.0, 220.0)
"""Values of ``a``. The best one is about the deviations that the risk stands for, times the
capacity over the standard deviation of the sum."""
UNIT = 1 << 32
"""Logarithms are whole numbers of so many parts, so that sums of them are exact."""
MOST_CAPACITIES = 3.0
"""Sizes are at most so many times the capacity: the exponential of more is beyond a float."""
PLACES = tuple(range(0, len(AHEAD) * len(EXPONENTS), len(EXPONENTS)))
"""Where the sums of each time begin."""


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that one request will hold over time, in the form in which needs are added."""

    logs: tuple[int, ...]
    """``log E[exp(a * bytes / C)]`` at each of ``AHEAD``, for each of ``EXPONENTS``."""
    most_bytes: int = 0
    """The most that it will hold."""

    @classmethod
    def of(cls, survival: Sequence[float], sizes: Sequence[int], capacity_bytes: int) -> "Need":
        """Of a request that runs with probability ``survival`` and then holds ``sizes``."""
        most, scales = int(MOST_CAPACITIES * capacity_bytes), _scales(capacity_bytes)
        logs = list[int]()
        for share, size in zip(survival, sizes, strict=True):
            held = min(size, most)
            if share > 0.0:
                logs += [int(UNIT * log1p(share * expm1(scale * held))) for scale in scales]
            else:
                logs += NO_TIME
        return cls(tuple(logs), max(sizes))

    @classmethod
    def constant(cls, size: int, capacity_bytes: int) -> "Need":
        """Of a request that keeps ``size`` bytes."""
        return cls.of((1.0,) * len(AHEAD), (size,) * len(AHEAD), capacity_bytes)


def _lowest(values: Sequence[float], at: int) -> float:
    """The least of a convex function of the exponents, whose smallest value is the one ``at``.

    It is that of the parabola through three values, which is exact if the sum is normal.
    """
    if not 0 < at < len(values) - 1:
        return values[at]
    (x0, x1, x2), (y0, y1, y2) = EXPONENTS[at - 1 : at + 2], values[at - 1 : at + 2]
    before, after = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
    curve = (after - before) / (x2 - x0)
    slope = before + curve * (x1 - x0)
    return y1 - slope * slope / (4 * curve) if curve > 0 else y1


@lru_cache
def _scales(capacity_bytes: int) -> tuple[float, ...]:
    return tuple(exponent / capacity_bytes for exponent in EXPONENTS)


NO_TIME = (0,) * len(EXPONENTS)
NOTHING = Need(NO_TIME * len(AHEAD))


Forecast = Callable[[], Need]


@dataclass(slots=True)
class Counted:
    """A request in the sums of an arena."""

    arena: str
    most_bytes: int
    """The most that it will hold."""
    need: Need | None = None
    """What was summed; None: nothing yet."""


@dataclass(slots=True)
class ArenaNeed:
    """Sums over the requests of one arena."""

    logs: list[int] = field(default_factory=lambda: [*NOTHING.logs])
    requests: int = 0
    most_bytes: int = 0
    changed: dict[str, Forecast] = field(default_factory=dict[str, Forecast])
    """Requests whose needs are others than those that were summed."""

    def add(self, need: Need) -> None:
        self.logs = [total + more for total, more in zip(self.logs, need.logs, strict=True)]

    def remove(self, need: Need) -> None:
        self.logs = [total - less for total, less in zip(self.logs, need.logs, strict=True)]


class Overcommit:
    """The needs of all started requests, summed by arena.

    Needs are computed when they are read, and nobody reads them while the requests of an arena fit
    into it whatever happens (``is_certain``).
    """

    def __init__(self, risk: float, capacity_bytes: int) -> None:
        """``risk``: the probability with which memory may run short.

        ``capacity_bytes``: page memory of an arena, which all needs are relative to.
        """
        self.capacity_bytes = capacity_bytes
        self._log_bound = -(NormalDist().inv_cdf(1.0 - risk) ** 2) / 2
        self._margin_bytes = -self._log_bound * capacity_bytes / EXPONENTS[-1]
        """Room that must be left so that the largest exponent alone shows that all fits."""
        self._counted = dict[str, Counted]()
        self._arenas = dict[str, ArenaNeed]()

    def __len__(self) -> int:
        return len(self._counted)

    def put(self, request: str, arena: str, need: Need) -> None:
        """Set what a started request needs, in place of what was known of it."""
        total = self._count(request, arena, need.most_bytes)
        counted = self._counted[request]
        if counted.need is not None:
            total.remove(counted.need)
        total.add(need)
        counted.need = need
        total.changed.pop(request, None)

    def forecast(self, request: str, arena: str, most_bytes: int, forecast: Forecast) -> None:
        """The same, where the need is computed when it is read.

        ``most_bytes``: the most that it will hold.
        """
        self._count(request, arena, most_bytes).changed[request] = forecast

    def _count(self, request: str, arena: str, most_bytes: int) -> ArenaNeed:
        """Count a request in an arena, and in no other one; returns the sums there."""
        counted = self._counted.get(request)
        if counted is None or counted.arena != arena:
            self.drop(request)
            counted = self._counted[request] = Counted(arena, 0)
            self._arenas.setdefault(arena, ArenaNeed()).requests += 1
        total = self._arenas[arena]
        total.most_bytes += most_bytes - counted.most_bytes
        counted.most_bytes = most_bytes
        return total

    def drop(self, request: str) -> None:
        """A request holds no pages any more."""
        counted = self._counted.pop(request, None)
        if counted is None:
            return
        total = self._arenas[counted.arena]
        total.requests -= 1
        if not total.requests:
            del self._arenas[counted.arena]
            return
        total.most_bytes -= counted.most_bytes
        total.changed.pop(request, None)
        if counted.need is not None:
            total.remove(counted.need)

    def is_certain(self, request: str, arena: str, most_bytes: int, memory_bytes: int) -> bool:
        """Whether ``fits`` would be true even if each request came to hold the most that it can.

        ``most_bytes``: what this request can come to hold.
        """
        total, own = self._arenas.get(arena), self._counted.get(request)
        others = total.most_bytes if total is not None else 0
        if own is not None and own.arena == arena:
            others -= own.most_bytes
        return others + most_bytes <= memory_bytes - self._margin_bytes

    def fits(self, request: str, arena: str, need: Need, memory_bytes: int) -> bool:
        """Whether another request can start, or one that keeps its pages go on.

        ``memory_bytes``: what requests may use now, lent memory included. The only request of an
        arena always can: its bound is below the capacity.
        """
        total = self._summed(arena)
        own = self._counted.get(request)
        if total is None or (own is not None and total.requests == 1):
            return True
        sums = [before + more for before, more in zip(total.logs, need.logs, strict=True)]
        if own is not None and own.arena == arena and own.need is not None:
            sums = [both - less for both, less in zip(sums, own.need.logs, strict=True)]
        return self._are_within(sums, memory_bytes)

    def room(self, arena: str, need: Need, memory_bytes: int, most: int) -> int:
        """How many more requests with this need can start, of ``most``; 1 in an empty arena."""
        total = self._summed(arena)
        logs = total.logs if total is not None else NOTHING.logs

        def is_too_much(count: int) -> bool:
            sums = [taken + count * more for taken, more in zip(logs, need.logs, strict=True)]
            return not self._are_within(sums, memory_bytes)

        count = bisect_left(range(1, most + 1), True, key=is_too_much)
        return max(count, min(most, int(total is None)))

    def _summed(self, arena: str) -> ArenaNeed | None:
        """The needs of an arena, with those that have changed since they were last read."""
        total = self._arenas.get(arena)
        if total is not None:
            for request, forecast in list(total.changed.items()):
                self.put(request, arena, forecast())
        return self._arenas.get(arena)

    def _are_within(self, sums: Sequence[int], memory_bytes: int) -> bool:
        """Whether more than ``memory_bytes`` are needed with at most the risk, at each time."""
        share = memory_bytes / self.capacity_bytes
        rooms = [exponent * share for exponent in EXPONENTS]
        bound = self._log_bound
        for at in PLACES:
            values = [
                total / UNIT - room
                for total, room in zip(sums[at : at + len(EXPONENTS)], rooms, strict=True)
            ]
            least = min(values)
            if least > bound and _lowest(values, values.index(least)) > bound:
                return False
        return True
