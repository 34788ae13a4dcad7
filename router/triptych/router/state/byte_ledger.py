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
    return arena == other or pool_of(arena) == pool_of(other)


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


@dataclass(slots=True)
class Account:
    """Bytes of one request."""

    lines: Lines = field(default_factory=lambda: NO_LINES)
    booked: int = 0
    """Sum of the lines."""
    held: int = 0
    bound: int = 0
    known_bound: int = 0
    """The bound that was given; 0: the booking is the bound."""


NO_ACCOUNT = Account()


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
    _accounts: dict[str, Account] = field(default_factory=dict[str, Account])
    """By request."""
    _booked: dict[str, int] = field(default_factory=dict[str, int])
    """By arena."""
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
        return self.capacity_bytes + self.lent.get(arena, 0) - self._booked.get(arena, 0)

    def used(self, arena: str) -> int:
        """Booked bytes less lent bytes: the capacity less this is free."""
        return self._booked.get(arena, 0) - self.lent.get(arena, 0)

    def lend(self, arena: str, count: int) -> None:
        """Set the total of prefix-cache memory that requests may use."""
        change = self.lent.get(arena, 0) - count
        self.lent[arena] = count
        self.on_change(arena, change)

    def booked_by(self, request: str) -> int:
        return self._account(request).booked

    def booked_in(self, request: str, arena: str) -> int:
        return self._account(request).lines.get(arena, 0)

    def held_of(self, request: str) -> int:
        return self._account(request).held

    def bound_of(self, request: str) -> int:
        return self._account(request).bound

    def _account(self, request: str) -> Account:
        return self._accounts.get(request, NO_ACCOUNT)

    def hold(self, request: str, held: int) -> None:
        """Record the bytes that a request with a booking holds; at most those that are booked."""
        account = self._accounts.get(request)
        if account is not None:
            held = min(held, account.booked)
            self.held_bytes += held - account.held
            account.held = held

    def bind(self, request: str, bound: int) -> None:
        """Record the most that a request with a booking may come to hold."""
        account = self._accounts.get(request)
        if account is not None:
            account.known_bound = bound
            self._bound(account)

    def fits(self, request: str, lines: Lines) -> bool:
        """Whether ``lines`` could replace the present booking of the request."""
        own = self._account(request).lines
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
        account = self._accounts.get(request)
        if account is None:
            account = self._accounts[request] = Account()
        before = account.lines
        account.lines, account.booked = lines, sum(lines.values())
        for arena, count in before.items():
            if arena not in lines:
                self._change(arena, -count)
        for arena, count in lines.items():
            self._change(arena, count - before.get(arena, 0))
        if account.held > account.booked:
            self.hold(request, account.booked)
        self._bound(account)
        return True

    def release(self, request: str) -> None:
        """Release the bookings of a request, if it has any."""
        account = self._accounts.pop(request, NO_ACCOUNT)
        for arena, count in account.lines.items():
            self._change(arena, -count)
        self.held_bytes -= account.held
        self.bound_bytes -= account.bound

    def _bound(self, account: Account) -> None:
        """Restore booked <= bound after either has changed."""
        bound = max(account.known_bound, account.booked)
        self.bound_bytes += bound - account.bound
        account.bound = bound

    def _change(self, arena: str, count: int) -> None:
        if count:
            self._booked[arena] = self.booked(arena) + count
            self.on_change(arena, count)
