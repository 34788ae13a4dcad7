"""Forecast of the bytes of compressed pages, as a share of their upper bound.

The share depends on what the policy finds in a text (tokens that are low or dropped) and on how
full pages are, so it is learned for each compression profile and for each doubling of the length.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from math import sqrt

MOST_PROFILES = 64
"""Profiles with shares of their own; the one that was used longest ago is dropped."""
LENGTHS = 24
"""Doublings of the length in tokens that are told apart."""
WEIGHT = 0.05
"""Least weight of the newest measurement in a mean."""
PRIOR_MEASUREMENTS = 2
"""Measurements that weigh as much as the prior: the bound itself."""


@dataclass(slots=True)
class Share:
    """Mean and variance of the share at one length."""

    mean: float = 1.0
    variance: float = 0.0
    count: int = PRIOR_MEASUREMENTS

    def note(self, value: float) -> None:
        self.count += 1
        weight = max(WEIGHT, 1.0 / self.count)
        off = value - self.mean
        self.mean += weight * off
        self.variance = (1.0 - weight) * (self.variance + weight * off * off)


@dataclass
class PageRatios:
    """Learns which share of the bound requests hold, by profile and length."""

    _shares: OrderedDict[str, list[Share | None]] = field(
        default_factory=OrderedDict[str, list[Share | None]]
    )

    def __len__(self) -> int:
        """Profiles that are known."""
        return len(self._shares)

    def note(self, profile: str, tokens: int, held: int, bound: int) -> None:
        """A request of ``tokens`` tokens holds ``held`` of at most ``bound`` bytes."""
        if bound <= 0:
            return
        shares = self._shares.get(profile)
        if shares is None:
            shares = self._shares[profile] = [None] * LENGTHS
            if len(self._shares) > MOST_PROFILES:
                self._shares.popitem(last=False)
        self._shares.move_to_end(profile)
        at = _length(tokens)
        share = shares[at] = shares[at] or Share()
        share.note(held / bound)

    def at(self, profile: str, tokens: int) -> tuple[float, float]:
        """Mean and standard deviation of the share at a length.

        Of the lengths that are known, the next shorter one counts, since long requests take a
        smaller share than short ones. 1 and 0 if there is none.

        >>> PageRatios().at("diffkv", 100)
        (1.0, 0.0)
        """
        shares = self._shares.get(profile)
        if shares is not None:
            for at in range(_length(tokens), -1, -1):
                share = shares[at]
                if share is not None:
                    return share.mean, sqrt(share.variance)
        return 1.0, 0.0


def _length(tokens: int) -> int:
    return min(LENGTHS - 1, max(1, tokens).bit_length() - 1)
