"""How fast the server is at present, and what that means for a request that has a deadline."""

from dataclasses import dataclass, field
from math import inf

from triptych.core.messages import Slo

WEIGHT = 0.1
"""Of the newest measurement in a mean."""
BELIEVED_S = 10.0
"""Age up to which a mean counts. Whoever is refused is not measured: without an end to what is
believed, one slow moment would refuse everybody for ever."""
TOKEN_MARGIN = 1.1
"""Times the mean that the tokens of an answer are taken to need: where the mean just keeps a limit,
half of them miss it. In the simulator 1.0 and 1.25 gave less goodput at 3 times saturation."""
HEADROOM = 0.5
"""Share of the time before the latest start after which a request loses patience."""


@dataclass
class Mean:
    """A mean that forgets, of what was measured a moment ago."""

    _value: float = 0.0
    _at: float = -inf

    def note(self, sample: float, now: float) -> None:
        is_old = now - self._at > BELIEVED_S
        self._value = sample if is_old else self._value + WEIGHT * (sample - self._value)
        self._at = now

    def at(self, now: float) -> float:
        """0 if nothing was measured for long: then nothing is known, and nobody is refused."""
        return self._value if now - self._at <= BELIEVED_S else 0.0


@dataclass(frozen=True, slots=True)
class Forecast:
    """When a request that comes now would have its tokens, in seconds."""

    wait_s: float
    """In the line."""
    read_s: float
    """From the line to the first token."""
    token_s: float
    """Each token after the first."""
    write_s: float
    """From the first token to the last, compression included."""

    @property
    def ttft_s(self) -> float:
        return self.wait_s + self.read_s

    @property
    def total_s(self) -> float:
        return self.ttft_s + self.write_s


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
    >>> miss(slo, Forecast(wait_s=0.5, read_s=0.4, token_s=0.1, write_s=2.0))
    >>> miss(slo, Forecast(wait_s=2.0, read_s=0.5, token_s=0.1, write_s=1.0)).what
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
        ends.append(slo.ttft_s - forecast.read_s)
    if slo.deadline_s:
        ends.append(slo.deadline_s - forecast.read_s - forecast.write_s)
    return max(0.0, min(ends))


@dataclass
class Pace:
    """Measures the stages as the router sees them, queues and neighbours included."""

    read_token_s: Mean = field(default_factory=Mean)
    """Seconds for each prompt token that is before a prefill worker."""
    token_s: Mean = field(default_factory=Mean)
    """Seconds for each token of an answer behind the first, compression included."""
    answer_tokens: Mean = field(default_factory=Mean)
    gap_s: Mean = field(default_factory=Mean)
    """Between two that leave the line while others wait."""
    _left: float | None = None
    """When the last one left a line in which others went on waiting."""

    def begin_line(self) -> None:
        """Nobody waits: what happens until somebody does says nothing of how fast a line moves."""
        self._left = None

    def left_line(self, still_waiting: int, now: float) -> None:
        """A waiting request started."""
        if self._left is not None:
            self.gap_s.note(now - self._left, now)
        self._left = now if still_waiting else None

    def read(self, seconds: float, tokens: int, now: float) -> None:
        """A prompt was read; so many tokens were before its worker when it was sent there."""
        self.read_token_s.note(seconds / max(1, tokens), now)

    def wrote(self, seconds: float, tokens: int, now: float) -> None:
        """An answer is complete, so many seconds behind its first token."""
        self.answer_tokens.note(tokens, now)
        if tokens > 1:
            self.token_s.note(seconds / (tokens - 1), now)

    def forecast(self, *, ahead: int, read_tokens: int, max_tokens: int, now: float) -> Forecast:
        """What to expect with ``ahead`` requests before it in the line.

        ``read_tokens``: those of its prompt, and before them at the worker that would read it. An
        answer is taken to be as long as others were, and no longer than it may be.
        """
        answer = min(float(max_tokens), self.answer_tokens.at(now) or 1.0)
        token_s = self.token_s.at(now)
        return Forecast(
            wait_s=ahead * self.gap_s.at(now),
            read_s=read_tokens * self.read_token_s.at(now),
            token_s=token_s,
            write_s=token_s * (answer - 1),
        )
