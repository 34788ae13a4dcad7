"""Which tokens of a request a merger merges: chunks inside segments of one modality.

Sinks, the recent window, the remainder of each segment and modalities without a network stay as
they are. A chunk never crosses the boundary of a segment.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from triptych.core.config import require
from triptych.core.images import TEXT, Segment

SINK_TOKENS = 4
WINDOW_TOKENS = 64


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """Tokens of a request after merging, in order of position.

    ``chunks``: first position of each chunk of ``chunk_tokens`` tokens, by modality. All positions
    that no chunk holds are ``kept``.
    """

    tokens: int
    chunk_tokens: int
    chunks: dict[str, tuple[int, ...]]
    kept: tuple[int, ...]

    @property
    def merged_tokens(self) -> int:
        """Tokens after merging."""
        return len(self.kept) + sum(len(starts) for starts in self.chunks.values())


def chunk_starts(
    segment: Segment, chunk_tokens: int, first: int, last: int, offset: int = 0
) -> range:
    """First positions of the whole chunks of a segment between ``first`` and ``last``."""
    start = max(segment.start, first) + offset
    return range(start, min(segment.end, last) - chunk_tokens + 1, chunk_tokens)


def plan_chunks(
    segments: Sequence[Segment],
    chunk_tokens: int,
    *,
    modalities: Collection[str] = (TEXT,),
    sink_tokens: int = SINK_TOKENS,
    window_tokens: int = WINDOW_TOKENS,
    offset: int = 0,
) -> ChunkPlan:
    """Cut each segment of a known modality into chunks, between sinks and window.

    ``offset``: tokens that are skipped at the start of each segment, so that training sees all
    phases.

    Raises:  ConfigError unless the segments follow one another from token 0 on
    Source:  FastCache, section 3.2 (a network per modality, parts are divided where it changes)
    """
    require(chunk_tokens >= 2, "chunk_tokens", chunk_tokens, ">= 2")
    end = 0
    for segment in segments:
        require(
            segment.start == end <= segment.end,
            "segments",
            list(segments),
            "consecutive segments from token 0 on",
        )
        end = segment.end
    first, last = sink_tokens, end - window_tokens
    chunks: dict[str, tuple[int, ...]] = {}
    for segment in segments:
        if segment.modality in modalities:
            found = chunk_starts(segment, chunk_tokens, first, last, offset)
            chunks[segment.modality] = chunks.get(segment.modality, ()) + tuple(found)
    merged = {
        start + i for starts in chunks.values() for start in starts for i in range(chunk_tokens)
    }
    kept = tuple(position for position in range(end) if position not in merged)
    return ChunkPlan(tokens=end, chunk_tokens=chunk_tokens, chunks=chunks, kept=kept)
