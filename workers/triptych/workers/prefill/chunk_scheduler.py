"""Whose part of a prompt a prefill worker reads next: short ones overtake, but not for ever."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import Protocol, TypeVar

PATIENCE = 2.0
"""Times its own length that a prompt lets others be read before it. 1 is nearly the order of
arrival; much more, and long prompts wait for whatever comes."""
WEIGHT = 0.2
"""Of the newest step in the mean of what a token takes."""


class Reading(Protocol):
    """A prompt in the queue of a prefill worker."""

    @property
    def due(self) -> float:
        """As ``ChunkScheduler.due`` gave it when the prompt came."""
        ...


R = TypeVar("R", bound=Reading)


@dataclass
class ChunkScheduler:
    """Earliest due first, at each chunk; time is counted in tokens that the worker has read.

    A prompt of n tokens is due when the worker has read ``PATIENCE`` n more, or when its limit on
    TTFT is reached. So of two that come together the shorter one is read first, equal ones are read
    as they came, and nobody is overtaken by a prompt that comes after it was due. What order the
    tokens of one prompt are read in never changes.

    Source: FlowPrefill (prefill that can be interrupted, earliest due first); we interrupt it
        between chunks, or between layers where these are encoded as they are read
    """

    read_tokens: int = 0
    """The clock."""
    token_s: float = 0.0
    """Seconds per token, of late; 0: nothing was read yet."""

    def due(self, tokens: int, ttft_s: float = 0.0) -> float:
        """When a prompt that comes now must have been read; ``ttft_s`` is its limit, 0 if none.

        >>> chunks = ChunkScheduler(read_tokens=100)
        >>> chunks.due(4096), chunks.due(50)
        (8292.0, 200.0)
        """
        limit = ttft_s / self.token_s if ttft_s and self.token_s else inf
        return self.read_tokens + min(PATIENCE * tokens, limit)

    def note(self, tokens: int, seconds: float) -> None:
        """A step has read so many tokens."""
        self.read_tokens += tokens
        sample = seconds / max(1, tokens)
        self.token_s += (WEIGHT if self.token_s else 1.0) * (sample - self.token_s)

    @staticmethod
    def in_order(queue: Iterable[R]) -> list[R]:
        """Who is read first; among those due together, who came first."""
        return sorted(queue, key=lambda reading: reading.due)
