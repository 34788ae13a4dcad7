"""Order of chunked prefill: earliest due first, so that short prompts overtake long ones."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import Protocol, TypeVar

OVERTAKE_FACTOR = 2.0
"""A prompt is due after this many times its own length in tokens. 1 is close to order of arrival;
larger values let more short prompts overtake."""
WEIGHT = 0.2
"""Weight of the newest step in the moving average of seconds per token."""


class QueuedPrompt(Protocol):
    """A prompt in the queue of a prefill worker."""

    @property
    def due(self) -> float:
        """From ``ChunkScheduler.due`` at the prompt's arrival."""
        ...


R = TypeVar("R", bound=QueuedPrompt)


@dataclass
class ChunkScheduler:
    """Schedules chunks earliest due first; the clock counts tokens that the worker has prefilled.

    A prompt of n tokens is due when the worker has prefilled ``OVERTAKE_FACTOR * n`` more tokens,
    or when its TTFT limit is reached. So of two prompts that arrive together the shorter goes
    first, equal ones go in order of arrival, and no prompt is overtaken by one that arrives after
    it was due. The tokens of one prompt are processed in order.

    Source: FlowPrefill (preemptible prefill, earliest due first); here prefill is preempted
        between chunks, or between layers if these are encoded during prefill
    """

    read_tokens: int = 0
    """Tokens prefilled so far: the clock."""
    token_s: float = 0.0
    """Moving average of seconds per token; 0 before the first step."""

    def due(self, tokens: int, ttft_s: float = 0.0) -> float:
        """Due time of a prompt that arrives now; ``ttft_s`` is its TTFT limit, 0 if none.

        >>> chunks = ChunkScheduler(read_tokens=100)
        >>> chunks.due(4096), chunks.due(50)
        (8292.0, 200.0)
        """
        limit = ttft_s / self.token_s if ttft_s and self.token_s else inf
        return self.read_tokens + min(OVERTAKE_FACTOR * tokens, limit)

    def note(self, tokens: int, seconds: float) -> None:
        """Advance the clock by the tokens of a step."""
        self.read_tokens += tokens
        sample = seconds / max(1, tokens)
        self.token_s += (WEIGHT if self.token_s else 1.0) * (sample - self.token_s)

    @staticmethod
    def in_order(queue: Iterable[R]) -> list[R]:
        """Prompts by due time; ties in order of arrival."""
        return sorted(queue, key=lambda prompt: prompt.due)
