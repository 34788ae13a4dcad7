"""Timing of one request: when its chunks arrived, and the number of tokens."""

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Chunk:
    """One stream event with part of the answer."""

    at_s: float
    """Arrival time on the client's monotonic clock."""

    tokens: int | None = None
    """Output tokens so far, if the server reports usage in each chunk."""


@dataclass(frozen=True)
class Sample:
    """One request from its due time to the end of its stream."""

    started_s: float
    """Send time; in an open loop the due time."""

    ended_s: float
    chunks: tuple[Chunk, ...] = ()
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None
    """Error text; the request counts as failed and in no latency."""

    text: str = field(default="", repr=False)

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.chunks[0].at_s - self.started_s

    @property
    def e2e_s(self) -> float:
        """End-to-end latency: until the last chunk."""
        return self.chunks[-1].at_s - self.started_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for an answer of one token."""
        if self.output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1)

    @property
    def chunk_gaps_s(self) -> list[float]:
        """Times between successive chunks."""
        times = [chunk.at_s for chunk in self.chunks]
        return [later - earlier for earlier, later in pairwise(times)]

    @cached_property
    def token_gaps_s(self) -> list[float]:
        """Inter-token latencies: each gap is divided by the tokens of its chunk.

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
