"""What one request did: the moments at which its tokens came, and how many there were."""

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Chunk:
    """One event of a stream that carried part of the answer."""

    at_s: float
    """When it was read, on the client's monotonic clock."""

    tokens: int | None = None
    """Tokens of the answer so far, where the server says so in every chunk."""


@dataclass(frozen=True)
class Sample:
    """One request from the moment it was due until its stream ended."""

    started_s: float
    """When it was sent; in an open loop, when it was due."""

    ended_s: float
    chunks: tuple[Chunk, ...] = ()
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None
    """What went wrong; such a request counts as failed and in no latency."""

    text: str = field(default="", repr=False)

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.chunks[0].at_s - self.started_s

    @property
    def e2e_s(self) -> float:
        """Until the last part of the answer."""
        return self.chunks[-1].at_s - self.started_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; none for an answer of one token."""
        if self.output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1)

    @property
    def chunk_gaps_s(self) -> list[float]:
        """Time between one chunk and the next: what the reader of the stream sees."""
        times = [chunk.at_s for chunk in self.chunks]
        return [later - earlier for earlier, later in pairwise(times)]

    @cached_property
    def token_gaps_s(self) -> list[float]:
        """Inter-token latency: each gap shared among the tokens that its chunk brought.

        A server that sends several tokens in a chunk is credited with all of them. Where the
        chunks do not say how many they carry, each is taken to carry the same number.
        """
        gaps = list[float]()
        for gap, count in zip(self.chunk_gaps_s, self._tokens_per_gap(), strict=True):
            whole = max(1, round(count))
            gaps += [gap / max(count, 1.0)] * whole
        return gaps

    def _tokens_per_gap(self) -> list[float]:
        counts = [chunk.tokens for chunk in self.chunks]
        known = [count for count in counts if count is not None]
        if len(known) == len(counts):
            return [float(max(1, later - earlier)) for earlier, later in pairwise(known)]
        gaps = max(1, len(counts) - 1)
        return [max(1.0, (self.output_tokens - 1) / gaps)] * (len(counts) - 1)
