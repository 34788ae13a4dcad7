"""Whether answers are written as fast as they were asked to be."""

from dataclasses import dataclass, field
from math import inf

AHEAD = 0.8
"""Share of a TPOT in which each token is to be there: the rest is for what may come between."""
PATIENT_S = 0.5
"""TPOT of who asks for none, while others want the cores."""


@dataclass
class DecodeDeadlines:
    """The answers of one decode worker.

    A step writes one token of each, so that what is due is counted in steps.
    """

    _steps: int = 0
    _asked: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    """When the token of step 0 was due, and how far tokens are apart."""

    def join(self, name: str, tpot_s: float, written: int, age_s: float, now: float) -> None:
        """An answer of ``written`` tokens goes on here, ``age_s`` behind the first of them.

        >>> tempo = DecodeDeadlines()
        >>> tempo.join("a", tpot_s=0.1, written=3, age_s=0.2, now=10.0)
        >>> f"{tempo.due:.2f}"  # 0.08 a token, of which two were due by now
        '10.04'
        >>> tempo.step()
        >>> f"{tempo.due:.2f}"
        '10.12'
        """
        apart_s = AHEAD * (tpot_s or PATIENT_S)
        self._asked[name] = now - age_s + apart_s * (written - self._steps), apart_s

    def leave(self, name: str) -> None:
        self._asked.pop(name, None)

    def step(self) -> None:
        """Each answer has one more token."""
        self._steps += 1

    @property
    def due(self) -> float:
        """When the next token of any answer is to be there."""
        steps = self._steps
        return min((due + apart_s * steps for due, apart_s in self._asked.values()), default=inf)
