"""Borrows memory of the prefix cache for requests that would have to wait for bytes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf

from triptych.core.handles import pool_of
from triptych.core.messages import POOL, BorrowCacheMemory, CacheMemoryBorrowed
from triptych.router.snapshot import HeldBy
from triptych.router.state.cluster_state import ClusterState

KEEP_S = 5.0
"""Seconds without a request waiting for memory after which it is returned. Returning it sooner
would evict prefixes at each burst of requests and compute them again after it."""
ANSWER_S = 0.5
"""Seconds within which the pool answers."""
ASK_AGAIN_S = 2.0
"""Seconds after which the router repeats a request that the pool did not answer or fulfil."""


def enough(shortages: Sequence[int], lent: int, limit: int) -> int:
    """Total bytes to borrow so that a waiting request can start.

    ``shortages``: bytes that waiting requests lack, the oldest first. The total covers the oldest
    if that is possible, else the smallest shortage; if none can be covered, it does not change.
    """
    totals = [lent + max(0, short) for short in shortages]
    possible = [total for total in totals if total <= limit]
    if not possible:
        return lent
    return totals[0] if totals[0] <= limit else min(possible)


@dataclass
class CacheBorrowing:
    """Borrows cache memory from the pool while requests wait for bytes, and returns it later.

    A waiting request has priority over cached prefixes, which are on disk or can be computed
    again. So the pool evicts prefixes before requests wait or are refused.

    The router requests a total, and the pool answers with the total that it lends. The ledger
    releases memory before it is returned and books it after it was lent, so no byte is booked
    twice. One request is open at a time, and only while all workers share one arena and pool.
    """

    cluster: ClusterState
    limit_bytes: int
    """Bytes of the prefix cache."""
    _asked: float = -inf
    """When the last request was sent that was not answered, or not in full."""
    _refused: float = -inf
    """When the pool last lent less than was requested."""
    _total: int = 0
    """Total that was requested last."""
    _pressed: float = -inf
    """When a request last waited for memory."""
    _known: set[str] = field(default_factory=set[str])
    """Arenas whose pool has answered; an earlier router may have borrowed there."""

    def may_lend(self, more: int, now: float) -> bool:
        """Whether the pool can probably lend ``more`` bytes at once.

        Not if it has just lent less than was requested, or does not answer.
        """
        lent = self.cluster.ledger.lent.get(self._arena(), 0)
        silent_s = now - self._asked if self._asked > -inf else 0.0
        is_refused = now - self._refused < ASK_AGAIN_S
        has_some = bool(self._arena()) and more <= self.limit_bytes - lent
        return has_some and not is_refused and silent_s < ANSWER_S

    def run(self, blocked_reason: HeldBy, now: float, short_bytes: int = 0) -> None:
        """Borrow what requests lack, or return what is not needed.

        ``short_bytes``: bytes that running requests lack.
        """
        if self.limit_bytes == 0 or now - self._asked < ASK_AGAIN_S:
            return
        arena = self._arena()
        if not arena:
            return
        ledger = self.cluster.ledger
        lent = ledger.lent.get(arena, 0)
        total = lent
        if short_bytes:
            self._pressed = now
            total = enough([short_bytes], lent, self.limit_bytes)
        elif blocked_reason == "no_bytes":
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
        """The pool reports how much it lends."""
        self._asked = now if message.bytes < self._total else -inf
        self._refused = self._asked
        self._known.add(message.arena)
        self.cluster.ledger.lend(message.arena, message.bytes)

    def _shortages(self, free: int, now: float) -> list[int]:
        """Bytes that the first request in order lacks, and the smallest one."""
        queue = self.cluster.requests.queue.at(now)
        both = (queue.in_order(), queue.smallest_first())
        return [one.bytes - free for order in both for one in islice(order, 1)]

    def _arena(self) -> str:
        """The only arena; empty if there are several, or the cache is in another one."""
        arenas = self.cluster.load_index.arenas
        arena = next(iter(arenas)) if len(arenas) == 1 else ""
        return arena if pool_of(arena) == arena else ""
