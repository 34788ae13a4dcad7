"""Sessions, turns and prompt segments, independent of the request format."""

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment of prompt tokens. Equal keys give equal tokens, for shared prefixes."""

    key: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: prompt segments and output length."""

    segments: tuple[Segment, ...]
    output_tokens: int
    pause_s: float = 0.0
    """Pause after the end of the previous turn, such as think time or a tool call."""
    images: tuple[str, ...] = ()
    """Keys of its images, which stand between pieces of its text. Equal keys give equal images."""

    @property
    def prompt_tokens(self) -> int:
        return sum(segment.tokens for segment in self.segments)

    def limited(self, prompt_tokens: int | None, output_tokens: int | None) -> "Turn":
        """The turn with prompt and output truncated to these lengths."""
        left = self.prompt_tokens if prompt_tokens is None else prompt_tokens
        kept = list[Segment]()
        for segment in self.segments:
            if left > 0:
                kept.append(replace(segment, tokens=min(segment.tokens, left)))
                left -= segment.tokens
        most = self.output_tokens if output_tokens is None else output_tokens
        output = min(self.output_tokens, most)
        return replace(self, segments=tuple(kept), output_tokens=output)


@dataclass(frozen=True, slots=True)
class Session:
    """Turns of one client, sent one after the other."""

    turns: tuple[Turn, ...]
    start_s: float = 0.0
    """Due time of the first turn from the start of the run; a closed loop ignores it."""


def requests_of(sessions: Iterable[Session]) -> int:
    """Number of requests of the sessions."""
    return sum(len(session.turns) for session in sessions)
