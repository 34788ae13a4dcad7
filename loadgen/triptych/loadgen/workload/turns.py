"""What clients want, before it has any form on the wire: prompts of segments, turns, sessions."""

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of prompt tokens. Equal keys have equal tokens: so prompts share a beginning."""

    key: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: what it reads, and how long its answer is to be."""

    segments: tuple[Segment, ...]
    output_tokens: int
    pause_s: float = 0.0
    """Time between the end of the turn before it and this one: a person thinks, a tool runs."""

    @property
    def prompt_tokens(self) -> int:
        return sum(segment.tokens for segment in self.segments)

    def limited(self, prompt_tokens: int | None, output_tokens: int | None) -> "Turn":
        """The same turn with a prompt and an answer that are no longer than so."""
        left = self.prompt_tokens if prompt_tokens is None else prompt_tokens
        kept = list[Segment]()
        for segment in self.segments:
            if left > 0:
                kept.append(replace(segment, tokens=min(segment.tokens, left)))
                left -= segment.tokens
        most = self.output_tokens if output_tokens is None else output_tokens
        return Turn(tuple(kept), min(self.output_tokens, most), self.pause_s)


@dataclass(frozen=True, slots=True)
class Session:
    """Turns of one client, each sent when the one before it has ended."""

    turns: tuple[Turn, ...]
    start_s: float = 0.0
    """When the first turn is due, from the start of the run; a closed loop does not ask."""


def requests_of(sessions: Iterable[Session]) -> int:
    """How many requests the sessions make."""
    return sum(len(session.turns) for session in sessions)
