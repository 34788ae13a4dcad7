"""Overcommit: whether the bytes that running requests will need probably fit.

A request needs its pages as long as it runs, and they grow with each token. Its bytes in ``t``
tokens from now are a random variable: those of its length then, if it still runs, else none. The
sum over all requests of an arena is taken to be normal, with the sums of their means and variances:
requests end independently of each other. It is compared with the capacity at each of ``AHEAD``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt
from statistics import NormalDist

AHEAD = (24, 64, 128, 256, 512, 1024, 2048, 4096)
"""Numbers of tokens from now at which the need is forecast: the horizon is the last one."""


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that one request will hold: mean and variance at each of ``AHEAD``.

    They are whole numbers, so that sums of them are exact.
    """

    means: tuple[int, ...]
    variances: tuple[int, ...]

    @classmethod
    def of(cls, survival: Sequence[float], sizes: Sequence[int]) -> "Need":
        """Of a request that runs with probability ``survival`` and then holds ``sizes``."""
        pairs = list(zip(survival, sizes, strict=True))
        return cls(
            tuple(int(share * size) for share, size in pairs),
            tuple(int(share * (1.0 - share) * size * size) for share, size in pairs),
        )

    @classmethod
    def constant(cls, size: int) -> "Need":
        """Of a request that keeps ``size`` bytes."""
        return cls((size,) * len(AHEAD), (0,) * len(AHEAD))


@dataclass(slots=True)
class ArenaNeed:
    """Sums over the requests of one arena."""

    means: list[int] = field(default_factory=lambda: [0] * len(AHEAD))
    variances: list[int] = field(default_factory=lambda: [0] * len(AHEAD))
    requests: int = 0


class Overcommit:
    """The needs of all started requests, summed by arena."""

    def __init__(self, risk: float) -> None:
        """``risk``: the probability with which memory may run short."""
        self._deviations = NormalDist().inv_cdf(1.0 - risk)
        self._needs = dict[str, tuple[str, Need]]()
        self._arenas = dict[str, ArenaNeed]()

    def __len__(self) -> int:
        return len(self._needs)

    def put(self, request: str, arena: str, need: Need) -> None:
        """Set what a started request needs, in place of what was known of it."""
        self.drop(request)
        self._needs[request] = arena, need
        self._add(self._arenas.setdefault(arena, ArenaNeed()), need, +1)

    def drop(self, request: str) -> None:
        """A request holds no pages any more."""
        arena, need = self._needs.pop(request, ("", None))
        if need is not None:
            total = self._arenas[arena]
            self._add(total, need, -1)
            if not total.requests:
                del self._arenas[arena]

    def fits(self, request: str, arena: str, need: Need, capacity_bytes: int) -> bool:
        """Whether another request can start, or one that keeps its pages go on.

        The only request of an arena always can: its bound is below the capacity.
        """
        total = self._arenas.get(arena)
        own = self._needs.get(request)
        if total is None or (own is not None and total.requests == 1):
            return True
        before = own[1] if own is not None and own[0] == arena else NOTHING
        sums = zip(
            total.means,
            total.variances,
            need.means,
            need.variances,
            before.means,
            before.variances,
            strict=True,
        )
        times = self._deviations
        return all(
            mean + more - less + times * sqrt(max(0, variance + wider - narrower)) <= capacity_bytes
            for mean, variance, more, wider, less, narrower in sums
        )

    @staticmethod
    def _add(total: ArenaNeed, need: Need, sign: int) -> None:
        total.requests += sign
        means, variances = total.means, total.variances
        for at in range(len(AHEAD)):
            means[at] += sign * need.means[at]
            variances[at] += sign * need.variances[at]


NOTHING = Need.constant(0)
