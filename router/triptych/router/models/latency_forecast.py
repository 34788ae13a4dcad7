"""How fast the server is at present, and what that means for a request that has a deadline."""

from collections import deque
from dataclasses import dataclass, field, replace
from math import ceil, inf

from triptych.core.messages import Slo

WEIGHT = 0.1
"""Of the newest measurement in a mean."""
BELIEVED_S = 10.0
"""Age up to which a mean counts. Whoever is refused is not measured: without an end to what is
believed, one slow moment would refuse everybody for ever."""
LATEST = 40
"""Forecasts that are compared with what became of them."""
SURE = 0.9
"""Share of them that would have come true with what is added to them now."""
TOKEN_MARGIN = 1.15
"""Times the trend that the tokens of an answer are taken to need: where it just keeps a limit, half
of them miss it. What was learned instead, as for first tokens, refused too many after a burst."""
FEW = 10
"""Of which some must have come later for it to count."""
CAUTION = 1.0
"""Squared requests of spread that it takes until a slope is believed as much as the guess."""
HEADROOM = 0.5
"""Share of the time before the latest start after which a request loses patience."""


@dataclass
class Mean:
    """A mean that forgets, of what was measured a moment ago."""

    _value: float = 0.0
    _at: float = -inf

    def note(self, sample: float, now: float) -> None:
        before = self._value if self.is_believed(now) else sample
        self._value = before + WEIGHT * (sample - before)
        self._at = now

    def is_believed(self, now: float) -> bool:
        return now - self._at <= BELIEVED_S

    def at(self, now: float) -> float:
        """0 if nothing was measured for long: then nothing is known, and nobody is refused."""
        return self._value if self.is_believed(now) else 0.0


@dataclass
class Trend:
    """A straight line that forgets, through what was measured a moment ago: y at x.

    As long as all was measured near one x, y is taken to grow in proportion: whoever asks for more
    than was ever seen is told too much rather than too little. From 0 x on y never falls.
    """

    _x: Mean = field(default_factory=Mean)
    _y: Mean = field(default_factory=Mean)
    _xx: float = 0.0
    _xy: float = 0.0

    def note(self, x: float, y: float, now: float) -> None:
        if not self._y.is_believed(now):
            self._xx = self._xy = 0.0
        else:
            off_x, off_y = x - self._x.at(now), y - self._y.at(now)
            self._xx = (1 - WEIGHT) * (self._xx + WEIGHT * off_x * off_x)
            self._xy = (1 - WEIGHT) * (self._xy + WEIGHT * off_x * off_y)
        self._x.note(x, now)
        self._y.note(y, now)

    def mean(self, now: float) -> float:
        """What was measured on the mean; 0 as `Mean.at`."""
        return self._y.at(now)

    def at(self, x: float, now: float) -> float:
        """0 if nothing was measured for long."""
        if not self._y.is_believed(now):
            return 0.0
        mean_x, mean_y = self._x.at(now), self._y.at(now)
        steepest = mean_y / mean_x if mean_x > 0 else 0.0
        slope = (self._xy + CAUTION * steepest) / (self._xx + CAUTION)
        return mean_y + min(steepest, max(0.0, slope)) * (x - mean_x)


@dataclass
class Lateness:
    """By how much what happened came later than it was forecast, of the latest few."""

    _latest: deque[tuple[float, float]] = field(
        default_factory=lambda: deque[tuple[float, float]](maxlen=LATEST)
    )

    def note(self, late: float, now: float) -> None:
        self._latest.append((now, late))

    def at(self, now: float) -> float:
        """What ``SURE`` of them did not exceed; never less than 0, which few say little against."""
        while self._latest and now - self._latest[0][0] > BELIEVED_S:
            self._latest.popleft()
        ordered = sorted(late for _, late in self._latest)
        place = ceil(SURE * max(FEW, len(ordered))) - 1 - max(0, FEW - len(ordered))
        return max(0.0, ordered[place]) if place >= 0 else 0.0


@dataclass(frozen=True, slots=True)
class Forecast:
    """When a request that comes now would have its tokens, in seconds."""

    wait_s: float
    """In the line."""
    prefill_s: float
    """From the line to the first token."""
    token_s: float
    """Each token after the first."""
    decode_s: float
    """From the first token to the last, compression included."""

    @property
    def ttft_s(self) -> float:
        return self.wait_s + self.prefill_s

    @property
    def total_s(self) -> float:
        return self.ttft_s + self.decode_s


NO_FORECAST = Forecast(wait_s=0.0, prefill_s=0.0, token_s=0.0, decode_s=0.0)
"""Of a request that asks for nothing in seconds."""


@dataclass(frozen=True, slots=True)
class Miss:
    """What of an SLO would not be kept."""

    what: str
    predicted_s: float
    asked_s: float

    @property
    def over_s(self) -> float:
        return self.predicted_s - self.asked_s


def miss(slo: Slo, forecast: Forecast) -> Miss | None:
    """The limit that is missed most, if any is; a limit of 0 is none.

    >>> slo = Slo(ttft_s=1.0, deadline_s=3.0)
    >>> miss(slo, Forecast(wait_s=0.5, prefill_s=0.4, token_s=0.1, decode_s=2.0))
    >>> miss(slo, Forecast(wait_s=2.0, prefill_s=0.5, token_s=0.1, decode_s=1.0)).what
    'ttft_slo_ms'
    """
    limits = [
        Miss("ttft_slo_ms", forecast.ttft_s, slo.ttft_s),
        Miss("tpot_slo_ms", TOKEN_MARGIN * forecast.token_s, slo.tpot_s),
        Miss("deadline_ms", forecast.total_s, slo.deadline_s),
    ]
    missed = [one for one in limits if 0 < one.asked_s < one.predicted_s]
    return max(missed, key=lambda one: one.over_s, default=None)


def latest_start_s(slo: Slo, forecast: Forecast) -> float:
    """How long a request may wait and still keep its SLO, if all goes on as at present."""
    ends = [inf]
    if slo.ttft_s:
        ends.append(slo.ttft_s - forecast.prefill_s)
    if slo.deadline_s:
        ends.append(slo.deadline_s - forecast.prefill_s - forecast.decode_s)
    return max(0.0, min(ends))


@dataclass
class LatencyForecast:
    """Measures the stages as the router sees them, queues and neighbours included."""

    prefill_token_s: Mean = field(default_factory=Mean)
    """Seconds for each prompt token that is before a prefill worker."""
    token_s: Trend = field(default_factory=Trend)
    """Seconds for each token of an answer behind the first, compression included, at the number of
    requests in work for each decode worker."""
    answer_tokens: Mean = field(default_factory=Mean)
    gap_s: Mean = field(default_factory=Mean)
    """Between two that leave the line while others wait."""
    late_first: Lateness = field(default_factory=Lateness)
    """First tokens, in seconds: a pause takes as long whether little or much was to be done."""
    concurrency_s: float = 0.0
    """Requests in work for each decode worker, summed over the seconds until ``_passed``."""
    _passed: float | None = None
    _left: float | None = None
    """When the last one left a line in which others went on waiting."""

    def record_concurrency(self, concurrency: float, now: float) -> None:
        """Until now, since this was called last, ``concurrency`` requests were in work."""
        if self._passed is not None:
            self.concurrency_s += concurrency * (now - self._passed)
        self._passed = now

    def reset_start_gap(self) -> None:
        """Nobody waits: what happens until somebody does says nothing of how fast a line moves."""
        self._left = None

    def record_start(self, still_waiting: int, now: float) -> None:
        """A waiting request started."""
        if self._left is not None:
            self.gap_s.note(now - self._left, now)
        self._left = now if still_waiting else None

    def record_prefill(self, seconds: float, tokens: int, now: float) -> None:
        """A prompt was read; so many tokens were before its worker when it was sent there."""
        self.prefill_token_s.note(seconds / max(1, tokens), now)

    def record_ttft(self, seconds: float, forecast: Forecast, now: float) -> None:
        """A first token came, or would now, so many seconds after its request."""
        if forecast.ttft_s:
            self.late_first.note(seconds - forecast.ttft_s, now)

    def record_decode(self, seconds: float, tokens: int, concurrency_s: float, now: float) -> None:
        """An answer is complete, so many seconds behind its first token.

        ``concurrency_s``: what ``self.crowd_s`` was then.
        """
        self.answer_tokens.note(tokens, now)
        if tokens > 1 and seconds > 0:
            token_s = seconds / (tokens - 1)
            self.token_s.note((self.concurrency_s - concurrency_s) / seconds, token_s, now)

    def forecast(
        self, *, ahead: int, concurrency: float, prefill_tokens: int, max_tokens: int, now: float
    ) -> Forecast:
        """What to expect with ``ahead`` requests ahead in the queue, and ``concurrency`` running.

        ``prefill_tokens``: tokens of its prompt and of the queue of its prefill worker. An answer
        is assumed to be as long as others were, and no longer than its limit.
        """
        answer = min(float(max_tokens), self.answer_tokens.at(now) or 1.0)
        token_s = self.token_s.at(concurrency, now)
        return Forecast(
            wait_s=ahead * self.gap_s.at(now),
            prefill_s=prefill_tokens * self.prefill_token_s.at(now),
            token_s=token_s,
            decode_s=token_s * (answer - 1),
        )

    def cautious(self, forecast: Forecast, now: float) -> Forecast:
        """The same, with first tokens as late as they have lately been."""
        return replace(forecast, prefill_s=forecast.prefill_s + self.late_first.at(now))
