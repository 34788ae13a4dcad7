"""Which block of the prefix index goes first: the policies, and a heap of those that may go."""

import heapq
import math
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

MIN_SECONDS = 1e-9
"""A block that took no measurable time is still worth more than nothing."""

MIN_COMPACT = 64

Rank = tuple[bool, float]
"""Whether the block has a soft pin, then the policy's value: the lowest is evicted first."""


class EvictionPolicy(Protocol):
    """Gives each block a rank; of the blocks that may be evicted, the lowest is evicted first."""

    def rank(self, before: float | None, seconds: float, nbytes: int, tick: int) -> float:
        """The rank of a block after a use at ``tick``; ``before`` is None for a new block.

        A rank must stay right until the next use of the block, however many ticks pass:
        the index never asks again in between.
        """
        ...


@dataclass(frozen=True, slots=True)
class CostPolicy:
    """Keep what saves most time per byte: evict the lowest seconds x expected uses / bytes.

    The uses of a block are an exponentially decayed count, halved every ``half_life`` ticks:

        uses(t) = sum over the uses at t_i of 2 ** ((t_i - t) / half_life)

    It is proportional to the number of uses to be expected in the next half life, which for
    rare blocks is the chance that there is one. The worth is seconds / bytes x uses(t), and
    all blocks decay by the same factor, so their order does not depend on t: the rank is the
    logarithm of the worth without the factor 2 ** (-t / half_life). Each use adds
    seconds / bytes x 2 ** (t / half_life) to it. So a rank is right for ever until the next
    use, a heap needs no update as time passes, and logarithms cannot overflow.

    The clock counts lookups, not seconds: what matters is a block's share of the traffic. A
    quiet night then changes nothing, and the same calls always give the same evictions.

    Source: GreedyDual-Size with frequency (cost, frequency and size in one rank); forward
        decay of Cormode and others, ICDE 2009 (ranks that need no update)
    """

    half_life: float = 1024.0
    """Lookups after which a use counts half. Of what
    ``benchmarks/kvpool/prefix_eviction.py`` tries, this is near the best for small caches and large
    ones, for popularity that drifts and that stays."""

    def rank(self, before: float | None, seconds: float, nbytes: int, tick: int) -> float:
        worth = math.log2(max(seconds, MIN_SECONDS) / nbytes) + tick / self.half_life
        return worth if before is None else _log2_of_sum(before, worth)


@dataclass(frozen=True, slots=True)
class LruPolicy:
    """Evict the least recently used block; the baseline."""

    def rank(self, before: float | None, seconds: float, nbytes: int, tick: int) -> float:
        return float(tick)


class Ranked(Protocol):
    """An item of an eviction heap, with the number of its valid entry."""

    stamp: int

    @property
    def rank(self) -> Rank: ...


R = TypeVar("R", bound=Ranked)


class LeafHeap(Generic[R]):
    """The lowest ranked of items that come and go, in logarithmic time.

    An item leaves by getting another stamp; its entry stays until it comes to the top, or
    until the heap has doubled and drops all dead entries at once. So an item may be in
    several heaps, and leaves all of them in one step.
    """

    def __init__(self) -> None:
        self._entries = list[tuple[Rank, int, R]]()
        self._compact_at = MIN_COMPACT

    def __len__(self) -> int:
        """Entries, dead ones included."""
        return len(self._entries)

    def push(self, item: R) -> None:
        """Add an item with a stamp that no item had before."""
        heapq.heappush(self._entries, (item.rank, item.stamp, item))
        if len(self._entries) > self._compact_at:
            self._entries = [entry for entry in self._entries if entry[2].stamp == entry[1]]
            heapq.heapify(self._entries)
            self._compact_at = max(MIN_COMPACT, 2 * len(self._entries))

    def pop(self) -> R | None:
        """Remove the item of lowest rank, of equals the one added first; None if there is none."""
        while self._entries:
            _, stamp, item = heapq.heappop(self._entries)
            if item.stamp == stamp:
                return item
        return None

    def peek(self) -> R | None:
        """The item that ``pop`` would remove."""
        item = self.pop()
        if item is not None:
            heapq.heappush(self._entries, (item.rank, item.stamp, item))
        return item

    def live(self) -> list[R]:
        """All items, in no order; for checks."""
        return [item for _, stamp, item in self._entries if item.stamp == stamp]


def _log2_of_sum(first: float, second: float) -> float:
    """``log2(2**first + 2**second)`` without overflow."""
    high, low = max(first, second), min(first, second)
    return high + math.log1p(2.0 ** (low - high)) / math.log(2.0)
