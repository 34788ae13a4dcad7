"""What became of the latest requests: when each of them entered which state, and how it ended."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from triptych.core.messages import CompressionReport, Request

KEPT = 256
"""Requests that are remembered: the newest ones, whether they have ended or not."""
MAX_STEPS = 32
"""Steps that are remembered of one request; a request that is orphaned again and again has more."""

End = Literal["", "finished", "failed", "cancelled"]
"""How a request ended for its client; empty: it has not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One attempt at a request: sizes and times, and nothing of what was said."""

    request: str
    number: int
    """Counts the requests since the router started: a name that tells nothing."""
    attempt: int
    """How many workers lost the request before."""
    prompt_tokens: int
    max_tokens: int
    steps: tuple[tuple[str, float], ...]
    """States, and when it entered them."""
    traceparent: str = ""
    """The trace that its client wants it to be part of."""
    end: End = ""
    code: str = ""
    """Of the error, if it failed."""
    ended: float = 0.0
    tokens: int = 0
    """Tokens of the answer, once it is finished."""
    report: CompressionReport | None = None
    """What compression did to it, once it was compressed."""


@dataclass
class History:
    """The newest requests, first come first. Never more than ``limit`` of them."""

    limit: int = KEPT
    _lives: dict[str, Life] = field(default_factory=dict[str, Life])
    _count: int = 0

    def __iter__(self) -> Iterator[Life]:
        return iter(self._lives.values())

    def number(self, request: str) -> int:
        """The number of a request; 0 if it is not remembered any more."""
        life = self._lives.get(request)
        return life.number if life else 0

    def begin(self, request: Request, state: str, now: float) -> None:
        """Remember a request that came in."""
        self._count += 1
        self._lives.pop(request.id, None)
        self._lives[request.id] = Life(
            request=request.id,
            number=self._count,
            attempt=request.attempt,
            prompt_tokens=len(request.known),
            max_tokens=request.sampling.max_tokens,
            steps=((state, now),),
            traceparent=request.traceparent,
        )
        while len(self._lives) > self.limit:
            del self._lives[next(iter(self._lives))]

    def note(self, request: str, state: str, report: CompressionReport | None, now: float) -> None:
        """Remember that a request entered a state."""
        life = self._lives.get(request)
        if life is not None and len(life.steps) < MAX_STEPS:
            self._lives[request] = replace(life, steps=(*life.steps, (state, now)), report=report)

    def end(self, request: str, end: End, now: float, *, code: str = "", tokens: int = 0) -> None:
        """Remember how a request ended; the first word counts."""
        life = self._lives.get(request)
        if life is not None and not life.end:
            self._lives[request] = replace(life, end=end, ended=now, code=code, tokens=tokens)
