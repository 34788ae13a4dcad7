"""Forecast of the output tokens that are left of a request, learned while answers are written.

Lengths are divided into ranges, two to each doubling. An answer that reaches a range ends in it
with a probability that is estimated as ends over answers that came there:

- A finished answer counts as one in each range that it went through, and as one end in its last.
- An answer that still runs, was cancelled, or reached ``max_tokens`` counts by the part of each
  range that it went through, and as no end. So a load whose answers are all long is learned before
  the first of them ends.

Within a range every token is equally likely to be the last one (a constant hazard).

Estimates shrink towards those of all tenants, and these towards a prior for chat: log-normal with a
median of 200 tokens and a mean of 330, near the answers of ShareGPT. Each answer that ends takes
1/256 of the weight of all earlier ones. Forecasts use hazards that are lower by half a standard
deviation of their estimates: so they are too long by half before anything was seen, and by little
where much was.

Source: the life table of survival analysis (Kaplan and Meier 1958 for single lengths); vLLM,
        section 6 (the lengths of ShareGPT)
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import exp, inf, log, sqrt
from statistics import NormalDist

MEDIAN_TOKENS = 200
SPREAD = 1.0
"""Standard deviation of the logarithm of an answer's length."""
EDGES = (0, *sorted({round(8 * 2 ** (step / 2)) for step in range(29)}))
"""Where ranges of lengths begin, in tokens; the last one has no end."""
PRIOR_ANSWERS = 16
"""Answers that come to a range and weigh as much as its prior."""
CAUTION = 0.5
"""Standard deviations of an estimate by which the hazard is taken to be lower: an error of it makes
all answers longer than forecast at once."""
SUREST = 1.0 - 1e-9
"""Highest estimate of the probability that an answer ends in a range."""
FORGET = 1 / 256
"""Share of the weight of all earlier answers that each answer takes when it ends."""
MOST_TENANTS = 1024
"""Tenants with estimates of their own; the one that was used longest ago is dropped."""
RENEW_AFTER = 16
"""Changes of the estimates of all tenants after which those of one tenant are computed again."""

WIDTHS = tuple(end - begin for begin, end in pairwise((*EDGES, 2 * EDGES[-1])))


def _prior() -> tuple[float, ...]:
    """Probability that an answer that reaches a range ends in it, before anything was seen."""
    length = NormalDist(log(MEDIAN_TOKENS), SPREAD)

    def log_survival(tokens: int) -> float:
        return log(1.0 - length.cdf(log(tokens))) if tokens else 0.0

    ends = [
        1.0 - exp(log_survival(edge + width) - log_survival(edge))
        for edge, width in zip(EDGES[:18], WIDTHS, strict=False)
    ]
    # Further out the tail of the log-normal is below the resolution of a float.
    return (*ends, *[ends[-1]] * (len(EDGES) - len(ends)))


PRIOR = _prior()


@dataclass(eq=False)
class Hazards:
    """Answers and ends in each range, and the hazards that follow from them."""

    ends: list[float] = field(default_factory=lambda: [0.0] * len(EDGES))
    answers: list[float] = field(default_factory=lambda: [0.0] * len(EDGES))
    """Answers that went through a range, or a part of it."""
    shares: list[float] = field(default_factory=lambda: list(PRIOR))
    """Estimated probability that an answer that reaches a range ends in it."""
    hazards: list[float] = field(default_factory=lambda: [0.0] * len(EDGES))
    """Probability of an end with the next token, as the rate of an exponential."""
    sums: list[float] = field(default_factory=lambda: [0.0] * len(EDGES))
    """Sum of the hazards of all tokens before each edge."""

    def write(self, before: int, after: int) -> None:
        """Count the tokens ``before`` to ``after`` of an answer."""
        at = bisect_right(EDGES, before) - 1
        while before < after:
            end = min(after, EDGES[at + 1]) if at + 1 < len(EDGES) else after
            self.answers[at] += (end - before) / WIDTHS[at]
            before, at = end, at + 1

    def end(self, tokens: int) -> None:
        """Count the end of an answer, and let earlier answers weigh less."""
        keep = 1.0 - FORGET
        self.ends = [count * keep for count in self.ends]
        self.answers = [count * keep for count in self.answers]
        at = bisect_right(EDGES, max(0, tokens - 1)) - 1
        self.ends[at] += 1.0
        # It counts whole in the range where it ends.
        self.answers[at] += max(0.0, 1.0 - (tokens - EDGES[at]) / WIDTHS[at])

    def renew(self, prior: Sequence[float]) -> None:
        """Compute the hazards from the counts and ``prior``, the shares to shrink to."""
        total = 0.0
        for at, width in enumerate(WIDTHS):
            answers = self.answers[at] + PRIOR_ANSWERS
            share = min(SUREST, (self.ends[at] + PRIOR_ANSWERS * prior[at]) / answers)
            least = max(0.0, share - CAUTION * sqrt(share * (1.0 - share) / (answers + 1.0)))
            hazard = -log(1.0 - least) / width
            self.shares[at], self.hazards[at], self.sums[at] = share, hazard, total
            total += hazard * width

    def until(self, tokens: int) -> float:
        """Sum of the hazards of the first ``tokens`` tokens."""
        at = bisect_right(EDGES, tokens) - 1
        return self.sums[at] + self.hazards[at] * (tokens - EDGES[at])

    def length_at(self, total: float) -> float:
        """The length until which the hazards sum up to ``total``."""
        at = bisect_right(self.sums, total) - 1
        hazard = self.hazards[at]
        return EDGES[at] + (total - self.sums[at]) / hazard if hazard > 0 else inf


class OutputLengths:
    """Learns the lengths of answers, of each tenant and of all, and forecasts what is left."""

    def __init__(self) -> None:
        self._all = Hazards()
        self._all.renew(PRIOR)
        self.changes = self._renewed = 0
        """Notes so far, and how many there were when the hazards of all were last computed."""
        self._tenants = OrderedDict[str, tuple[Hazards, list[int]]]()
        """Hazards of each tenant, and ``changes`` when they were last computed."""

    def __len__(self) -> int:
        """Tenants with estimates of their own."""
        return len(self._tenants)

    def note_written(self, tenant: str, before: int, after: int) -> None:
        """An answer grew from ``before`` to ``after`` tokens."""
        if after > before:
            self.changes += 1
            self._all.write(before, after)
            self._counts_of(tenant).write(before, after)

    def note_end(self, tenant: str, tokens: int) -> None:
        """An answer ended after ``tokens`` tokens, before it reached a limit."""
        self.changes += 1
        self._all.end(tokens)
        self._counts_of(tenant).end(tokens)

    def survival(
        self, tenant: str, written: int, limit: int, ahead: Sequence[int]
    ) -> tuple[float, ...]:
        """Probability that an answer is longer by each number of tokens in ``ahead``.

        ``written``: its tokens so far; ``limit``: the most that it can have.
        """
        hazards = self._of(tenant)
        begin, until = hazards.until(written), hazards.until
        return tuple(
            exp(begin - until(written + more)) if written + more < limit else 0.0 for more in ahead
        )

    def quantile(self, tenant: str, written: int, limit: int, share: float) -> int:
        """Tokens below which an answer ends with probability ``share``; at most ``limit``.

        >>> OutputLengths().quantile("", 0, 4096, 0.5)  # nothing was seen
        286
        """
        hazards = self._of(tenant)
        total = hazards.until(written) - log(1.0 - share)
        return min(limit, round(min(float(limit), hazards.length_at(total))))

    def _counts_of(self, tenant: str) -> Hazards:
        found = self._tenants.get(tenant)
        if found is None:
            found = self._tenants[tenant] = Hazards(), [-RENEW_AFTER]
            if len(self._tenants) > MOST_TENANTS:
                self._tenants.popitem(last=False)
        self._tenants.move_to_end(tenant)
        return found[0]

    def _of(self, tenant: str) -> Hazards:
        """The hazards of a tenant; those of all if nothing is known of it."""
        if self.changes - self._renewed >= RENEW_AFTER:
            self._renewed = self.changes
            self._all.renew(PRIOR)
        found = self._tenants.get(tenant)
        if found is None:
            return self._all
        hazards, renewed = found
        if self.changes - renewed[0] >= RENEW_AFTER:
            renewed[0] = self.changes
            hazards.renew(self._all.shares)
        return hazards
