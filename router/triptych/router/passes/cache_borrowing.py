"""Memory that the pool keeps prefixes in, lent to requests that would have to wait."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf

from triptych.core.messages import POOL, BorrowCacheMemory, CacheMemoryBorrowed
from triptych.router.snapshot import HeldBy
from triptych.router.state.cluster_state import ClusterState

KEEP_S = 5.0
"""Seconds without anybody waiting for memory after which it goes back: a prefix that is evicted
for each burst of requests and read again after it would cost more than it saves."""
ASK_AGAIN_S = 2.0
"""Seconds after which a pool is asked again that did not answer, or could not lend all."""


def enough(shortages: Sequence[int], lent: int, limit: int) -> int:
    """How much is to be lent in all, so that somebody need not wait.

    ``shortages`` are what waiting requests lack, the oldest first. The oldest is helped if that
    is possible at all, or else the one that lacks least; if nobody can be helped, nothing changes.
    """
    totals = [lent + max(0, short) for short in shortages]
    possible = [total for total in totals if total <= limit]
    if not possible:
        return lent
    return totals[0] if totals[0] <= limit else min(possible)


@dataclass
class CacheBorrowing:
    """Asks the pool for memory when requests wait for it, and gives back what nobody needs.

    A request that waits is worth more than the prefixes of others: these are on disk, or can be
    computed again. So the pool evicts before anybody waits, and long before anybody is refused.

    The pool is told how much it is to lend in all, and says how much it does. What goes back is
    taken from the books first, and what comes is entered last, so nothing is ever promised twice.
    One question is open at a time, and only while all workers share one arena: there is one pool.
    """

    cluster: ClusterState
    limit_bytes: int
    """What is set aside for prefixes."""
    _asked: float = -inf
    """When a question was asked that was not answered, or not in full."""
    _total: int = 0
    """What was asked for last."""
    _pressed: float = -inf
    """When somebody last waited for memory."""
    _known: set[str] = field(default_factory=set[str])
    """Arenas whose pool has answered: another router may have borrowed there before."""

    def run(self, blocked_reason: HeldBy, now: float) -> None:
        """Ask for what is lacking, or give back what is not."""
        if self.limit_bytes == 0 or now - self._asked < ASK_AGAIN_S:
            return
        arena = self._arena()
        if not arena:
            return
        ledger = self.cluster.ledger
        lent = ledger.lent.get(arena, 0)
        total = lent
        if blocked_reason == "no_bytes":
            self._pressed = now
            total = enough(self._shortages(ledger.free(arena), now), lent, self.limit_bytes)
        elif now - self._pressed >= KEEP_S:
            total = min(lent, max(0, ledger.booked(arena) - ledger.capacity_bytes))
        if total == lent and arena in self._known:
            return
        if total < lent:
            ledger.lend(arena, total)
        if total != lent:
            self.cluster.counters["memory_asked" if total > lent else "memory_returned"] += 1
        self.cluster.outbox.post(POOL, BorrowCacheMemory(bytes=total))
        self._asked, self._total = now, total

    def on_borrowed(self, message: CacheMemoryBorrowed, now: float) -> None:
        """The pool says how much it lends."""
        self._asked = now if message.bytes < self._total else -inf
        self._known.add(message.arena)
        self.cluster.ledger.lend(message.arena, message.bytes)

    def _shortages(self, free: int, now: float) -> list[int]:
        """What the oldest lacks, and the smallest: nobody between them is asked for first."""
        queue = self.cluster.requests.queue.at(now)
        both = (queue.in_order(), queue.smallest_first())
        return [one.bytes - free for order in both for one in islice(order, 1)]

    def _arena(self) -> str:
        arenas = self.cluster.load_index.arenas
        return next(iter(arenas)) if len(arenas) == 1 else ""
