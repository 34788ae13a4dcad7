"""Byte ledger: the bytes that each request has booked in each arena."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from triptych.core.handles import pool_of
from triptych.router.models.memory_estimate import RequestBytes

Lines = Mapping[str, int]
"""Bytes by arena."""
NO_LINES: Lines = {}


def are_peers(arena: str, other: str) -> bool:
    """Whether two arenas are of one pool: then no page is fetched from one to the other."""
    return pool_of(arena) == pool_of(other)


def lines_before_encoding(
    sizes: RequestBytes, raw_arena: str, work_arena: str, final_arena: str
) -> Lines:
    """Bytes that a request books until its raw pages are free.

    They cover all that it can ever need. So a started request never waits for memory, and the
    stages cannot block each other.

    ``work_arena``: the arena of the compressor. Raw pages of another pool are fetched there, and
    encoded pages for another pool are fetched from there. It reads and writes all arenas of its own
    pool.
    """
    reads = raw_arena if are_peers(raw_arena, work_arena) else work_arena
    writes = final_arena if are_peers(work_arena, final_arena) else work_arena
    if reads == writes == final_arena:
        lines = {final_arena: sizes.peak}
    else:
        lines = {final_arena: sizes.moved().grown}
        lines[reads] = lines.get(reads, 0) + sizes.raw
        if writes != final_arena:
            lines[writes] = lines.get(writes, 0) + sizes.encoded
    if raw_arena != reads:
        lines[raw_arena] = lines.get(raw_arena, 0) + sizes.raw
    return lines


def lines_after_encoding(sizes: RequestBytes, work_arena: str, final_arena: str) -> Lines:
    """Bytes that stay booked during decode: its pages and their growth to the end.

    Until another pool fetches them, they are in the compressor's arena as well.
    """
    if are_peers(work_arena, final_arena):
        return {final_arena: sizes.grown}
    return {work_arena: sizes.compressed, final_arena: sizes.moved().grown}


def _nothing(_arena: str, _change: int) -> None:
    return


@dataclass
class ByteLedger:
    """Bookings of requests by arena, and beside them what they hold and what they may come to need.

    *Held*: bytes of pages, as the stages reported last. *Booked*: the most that a request may hold
    now. *Bound*: the most that it may come to hold. No arena is ever booked above its capacity.
    """

    capacity_bytes: int
    """Page memory of each arena that requests may use, in bytes."""
    lent: dict[str, int] = field(default_factory=dict[str, int])
    """Memory of the prefix cache that requests may use beyond that, by arena."""

    on_change: Callable[[str, int], None] = _nothing
    """Called with each arena whose used bytes change, and the change."""
    _lines: dict[str, Lines] = field(default_factory=dict[str, Lines])
    _booked: dict[str, int] = field(default_factory=dict[str, int])
    _held: dict[str, int] = field(default_factory=dict[str, int])
    _bounds: dict[str, int] = field(default_factory=dict[str, int])
    _known_bounds: dict[str, int] = field(default_factory=dict[str, int])
    """Bounds that were given; of other requests the booking is the bound."""
    held_bytes: int = 0
    """Held by all requests."""
    bound_bytes: int = 0
    """Sum of the bounds of all requests."""

    @property
    def arenas(self) -> dict[str, int]:
        """Bytes booked, by arena; arenas with nothing booked are left out."""
        return {arena: count for arena, count in self._booked.items() if count}

    def booked(self, arena: str) -> int:
        return self._booked.get(arena, 0)

    def free(self, arena: str) -> int:
        return self.capacity_bytes + self.lent.get(arena, 0) - self.booked(arena)

    def used(self, arena: str) -> int:
        """Booked bytes less lent bytes: the capacity less this is free."""
        return self.booked(arena) - self.lent.get(arena, 0)

    def lend(self, arena: str, count: int) -> None:
        """Set the total of prefix-cache memory that requests may use."""
        change = self.lent.get(arena, 0) - count
        self.lent[arena] = count
        self.on_change(arena, change)

    def booked_by(self, request: str) -> int:
        return sum(self._lines.get(request, {}).values())

    def booked_in(self, request: str, arena: str) -> int:
        return self._lines.get(request, {}).get(arena, 0)

    def held_of(self, request: str) -> int:
        return self._held.get(request, 0)

    def bound_of(self, request: str) -> int:
        return self._bounds.get(request, 0)

    def hold(self, request: str, held: int) -> None:
        """Record the bytes that a request with a booking holds; at most those that are booked."""
        if request in self._lines:
            held = min(held, self.booked_by(request))
            self.held_bytes += held - self._held.get(request, 0)
            self._held[request] = held

    def bind(self, request: str, bound: int) -> None:
        """Record the most that a request with a booking may come to hold."""
        if request in self._lines:
            self._known_bounds[request] = bound
            self._renew(request)

    def fits(self, request: str, lines: Lines) -> bool:
        """Whether ``lines`` could replace the present booking of the request."""
        own = self._lines.get(request, NO_LINES)
        for arena, count in lines.items():  # noqa: SIM110  # a generator costs twice
            if count - own.get(arena, 0) > self.free(arena):
                return False
        return True

    def book(self, request: str, lines: Lines) -> bool:
        """Replace the booking of the request; False, without a change, if it does not fit."""
        if min(lines.values(), default=0) < 0:
            raise ValueError(f"negative booking for {request}: {dict(lines)}")
        if not self.fits(request, lines):
            return False
        before = self._lines.get(request, NO_LINES)
        self._lines[request] = lines
        for arena, count in before.items():
            if arena not in lines:
                self._change(arena, -count)
        for arena, count in lines.items():
            self._change(arena, count - before.get(arena, 0))
        self._renew(request)
        return True

    def release(self, request: str) -> None:
        """Release the bookings of a request, if it has any."""
        for arena, count in self._lines.pop(request, {}).items():
            self._change(arena, -count)
        self.held_bytes -= self._held.pop(request, 0)
        self.bound_bytes -= self._bounds.pop(request, 0)
        self._known_bounds.pop(request, None)

    def _renew(self, request: str) -> None:
        """Restore held <= booked <= bound after a booking of a request has changed."""
        self.hold(request, self._held.get(request, 0))
        bound = max(self._known_bounds.get(request, 0), self.booked_by(request))
        self.bound_bytes += bound - self._bounds.get(request, 0)
        self._bounds[request] = bound

    def _change(self, arena: str, count: int) -> None:
        if count:
            self._booked[arena] = self.booked(arena) + count
            self.on_change(arena, count)
