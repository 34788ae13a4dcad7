"""How long requests wait and are in each stage: cumulative counts, as Prometheus has histograms."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

BOUNDS_S = (
    *(0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0),
    *(30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
"""Upper bounds of the buckets in seconds: those of vLLM, and five below them."""
PARTS = {
    "waiting": "queue",
    "prefilling": "prefill",
    **dict.fromkeys(("prefilled", "compressing", "planned", "encoding", "compressed"), "compress"),
}
"""States of a request, and the part of its time that they belong to. The last part ends when a
decode worker is chosen. Decoding is measured where the tokens arrive."""


@dataclass(frozen=True, slots=True)
class StageTime:
    """The times of one part."""

    counts: tuple[int, ...] = (0,) * (len(BOUNDS_S) + 1)
    """Times by bucket; the last bucket has no upper bound."""
    total_s: float = 0.0

    def __add__(self, other: "StageTime") -> "StageTime":
        counts = tuple(one + more for one, more in zip(self.counts, other.counts, strict=True))
        return StageTime(counts, self.total_s + other.total_s)


@dataclass(slots=True)
class StageTimes:
    """The times of all parts, of every request since the start.

    A request that is preempted or computed again has several times of a part.
    """

    _counts: dict[str, list[int]] = field(
        default_factory=lambda: {part: [0] * (len(BOUNDS_S) + 1) for part in PARTS.values()}
    )
    _total_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS.values(), 0.0))

    def add(self, part: str, seconds: float) -> None:
        """Count one time."""
        self._counts[part][bisect_left(BOUNDS_S, seconds)] += 1
        self._total_s[part] += seconds

    def snapshot(self) -> Mapping[str, StageTime]:
        """All times, by part."""
        return {
            part: StageTime(tuple(counts), self._total_s[part])
            for part, counts in self._counts.items()
        }
