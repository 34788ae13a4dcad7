"""Deadlines of output tokens in a decode worker, from the TPOT of each request."""

from dataclasses import dataclass, field
from math import inf

TPOT_SHARE = 0.8
"""Share of the TPOT after which a token is due; the rest is a margin for other work."""
DEFAULT_TPOT_S = 0.5
"""TPOT of requests without one, while prefill waits for the cores."""


@dataclass
class DecodeDeadlines:
    """Token deadlines of the running requests of one decode worker.

    A step adds one token to each request, so deadlines are kept in steps.
    """

    _steps: int = 0
    _deadlines: dict[str, tuple[float, float]] = field(
        default_factory=dict[str, tuple[float, float]]
    )
    """Due time of the token of step 0, and the seconds between tokens."""

    def join(self, name: str, tpot_s: float, written: int, age_s: float, now: float) -> None:
        """Add a request with ``written`` output tokens, ``age_s`` after the first of them.

        >>> deadlines = DecodeDeadlines()
        >>> deadlines.join("a", tpot_s=0.1, written=3, age_s=0.2, now=10.0)
        >>> f"{deadlines.due:.2f}"  # 0.08 a token, of which two were due by now
        '10.04'
        >>> deadlines.step()
        >>> f"{deadlines.due:.2f}"
        '10.12'
        """
        apart_s = TPOT_SHARE * (tpot_s or DEFAULT_TPOT_S)
        self._deadlines[name] = now - age_s + apart_s * (written - self._steps), apart_s

    def leave(self, name: str) -> None:
        self._deadlines.pop(name, None)

    def step(self, count: int = 1) -> None:
        """Count ``count`` more tokens of each request."""
        self._steps += count

    @property
    def due(self) -> float:
        """Due time of the next token of any request."""
        steps = self._steps
        return min(
            (due + apart_s * steps for due, apart_s in self._deadlines.values()), default=inf
        )
