"""Latency forecasts for requests with an SLO, from recent measurements."""

from collections import deque
from dataclasses import dataclass, field, replace
from math import ceil, inf

from triptych.core.messages import Slo

WEIGHT = 0.1
"""Weight of the newest measurement in a mean."""
BELIEVED_S = 10.0
"""Age up to which a mean is valid. Refused requests give no measurements, so without this bound one
slow moment would cause refusals for ever."""
LATEST = 40
"""Number of latest forecasts that are compared with their outcomes."""
SURE = 0.9
"""Share of them that the margin must cover."""
TOKEN_MARGIN = 1.15
"""Times the trend that the tokens of an answer are taken to need: where it just keeps a limit, half
of them miss it. What was learned instead, as for first tokens, refused too many after a burst."""
FEW = 10
"""Number of outcomes below which missing ones count as on time."""
CAUTION = 1.0
"""Variance of x, in squared requests, at which a fitted slope and the prior weigh the same."""
HEADROOM = 0.5
"""Share of the time before the latest start after which a request is overdue."""


@dataclass
class Mean:
    """Exponential moving mean that is valid for ``BELIEVED_S``."""

    _value: float = 0.0
    _at: float = -inf

    def note(self, sample: float, now: float) -> None:
        before = self._value if self.is_believed(now) else sample
        self._value = before + WEIGHT * (sample - before)
        self._at = now

    def is_believed(self, now: float) -> bool:
        return now - self._at <= BELIEVED_S

    def at(self, now: float) -> float:
        """The mean; 0 without a recent measurement, so that no request is refused."""
        return self._value if self.is_believed(now) else 0.0


@dataclass
class Trend:
    """Exponentially weighted linear fit of y over x, valid for ``BELIEVED_S``.

    While all measurements are near one x, y is assumed proportional to x, which overestimates
    beyond the measured range. The slope is never negative.
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
        """Mean of y; 0 without a recent measurement."""
        return self._y.at(now)

    def at(self, x: float, now: float) -> float:
        """The fit at ``x``; 0 without a recent measurement."""
        if not self._y.is_believed(now):
            return 0.0
        mean_x, mean_y = self._x.at(now), self._y.at(now)
        steepest = mean_y / mean_x if mean_x > 0 else 0.0
        slope = (self._xy + CAUTION * steepest) / (self._xx + CAUTION)
        return mean_y + min(steepest, max(0.0, slope)) * (x - mean_x)


@dataclass
class Lateness:
    """Delay of the latest outcomes against their forecasts."""

    _latest: deque[tuple[float, float]] = field(
        default_factory=lambda: deque[tuple[float, float]](maxlen=LATEST)
    )

    def note(self, late: float, now: float) -> None:
        self._latest.append((now, late))

    def at(self, now: float) -> float:
        """Quantile ``SURE`` of the recent delays, at least 0."""
        while self._latest and now - self._latest[0][0] > BELIEVED_S:
            self._latest.popleft()
        ordered = sorted(late for _, late in self._latest)
        place = ceil(SURE * max(FEW, len(ordered))) - 1 - max(0, FEW - len(ordered))
        return max(0.0, ordered[place]) if place >= 0 else 0.0


@dataclass(frozen=True, slots=True)
class Forecast:
    """Forecast times of a request that arrives now, in seconds."""

    wait_s: float
    """In the waiting queue."""
    prefill_s: float
    """From the start to the first token."""
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
"""Forecast of a request without an SLO."""


@dataclass(frozen=True, slots=True)
class Miss:
    """A limit of an SLO that would be missed."""

    what: str
    predicted_s: float
    asked_s: float

    @property
    def over_s(self) -> float:
        return self.predicted_s - self.asked_s


def miss(slo: Slo, forecast: Forecast) -> Miss | None:
    """The limit that would be missed most, if any; a limit of 0 is none.

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
    """Longest wait with which a request still meets its SLO, by the forecast."""
    ends = [inf]
    if slo.ttft_s:
        ends.append(slo.ttft_s - forecast.prefill_s)
    if slo.deadline_s:
        ends.append(slo.deadline_s - forecast.prefill_s - forecast.decode_s)
    return max(0.0, min(ends))


@dataclass
class LatencyForecast:
    """Measures the latency of the stages as the router sees it, queues included."""

    prefill_token_s: Mean = field(default_factory=Mean)
    """Seconds for each prompt token in the queue of a prefill worker."""
    token_s: Trend = field(default_factory=Trend)
    """Seconds for each token of an answer behind the first, compression included, at the number of
    requests in work for each decode worker."""
    answer_tokens: Mean = field(default_factory=Mean)
    gap_s: Mean = field(default_factory=Mean)
    """Time between two starts while requests wait."""
    late_first: Lateness = field(default_factory=Lateness)
    """Delay of first tokens against their forecasts, in seconds."""
    concurrency_s: float = 0.0
    """Requests in work for each decode worker, summed over the seconds until ``_passed``."""
    _passed: float | None = None
    _left: float | None = None
    """When the last request started while others kept waiting."""

    def record_concurrency(self, concurrency: float, now: float) -> None:
        """Until now, since this was called last, ``concurrency`` requests were in work."""
        if self._passed is not None:
            self.concurrency_s += concurrency * (now - self._passed)
        self._passed = now

    def reset_start_gap(self) -> None:
        """The queue is empty: the time until the next start is no measurement."""
        self._left = None

    def record_start(self, still_waiting: int, now: float) -> None:
        """A waiting request started."""
        if self._left is not None:
            self.gap_s.note(now - self._left, now)
        self._left = now if still_waiting else None

    def record_prefill(self, seconds: float, tokens: int, now: float) -> None:
        """A prompt was prefilled; ``tokens``: queue of its worker when it was sent there."""
        self.prefill_token_s.note(seconds / max(1, tokens), now)

    def record_ttft(self, seconds: float, forecast: Forecast, now: float) -> None:
        """A first token was sampled, or would be now, ``seconds`` after the arrival."""
        if forecast.ttft_s:
            self.late_first.note(seconds - forecast.ttft_s, now)

    def record_decode(self, seconds: float, tokens: int, concurrency_s: float, now: float) -> None:
        """An output is complete, ``seconds`` after its first token.

        ``concurrency_s``: the value of ``self.concurrency_s`` at the first token.
        """
        self.answer_tokens.note(tokens, now)
        if tokens > 1 and seconds > 0:
            token_s = seconds / (tokens - 1)
            self.token_s.note((self.concurrency_s - concurrency_s) / seconds, token_s, now)

    def forecast(
        self, *, ahead: int, concurrency: float, prefill_tokens: int, max_tokens: int, now: float
    ) -> Forecast:
        """The forecast with ``ahead`` requests ahead in the queue, and ``concurrency`` running.

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
        """The same forecast with a margin for the recent delay of first tokens."""
        return replace(forecast, prefill_s=forecast.prefill_s + self.late_first.at(now))
