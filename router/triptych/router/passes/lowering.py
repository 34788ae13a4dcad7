"""Has high tokens of running requests stored as low ones while memory is short."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf

from triptych.core.messages import Lower, Lowered
from triptych.router.models.booking import BookingModel
from triptych.router.passes.migration import can_move
from triptych.router.state.byte_ledger import lines_after_encoding
from triptych.router.state.cluster_state import ClusterState
from triptych.router.state.decision_log import DecisionLog
from triptych.router.state.request_table import Entry, State

LOOK_AGAIN_S = 0.02
"""Seconds after which requests are looked for again, if none could be lowered."""


def requests_to_lower(gains: Sequence[tuple[int, str]], short: int) -> list[tuple[str, int]]:
    """Requests to lower, with the bytes that each is to free.

    ``gains``: what each request can probably free, and its id, the youngest first. Those that can
    free most come first, so that few requests lose precision; of equals the youngest.

    >>> requests_to_lower([(10, "young"), (50, "long"), (10, "old")], 55)
    [('long', 50), ('young', 5)]
    """
    chosen = list[tuple[str, int]]()
    for gain, name in sorted(gains, key=lambda one: -one[0]):
        if short <= 0:
            break
        chosen.append((name, min(gain, short)))
        short -= gain
    return chosen


@dataclass(frozen=True, slots=True)
class PendingLowering:
    """A request that its worker is lowering."""

    number: int
    arena: str
    wanted: int
    """Bytes that are to be freed."""


@dataclass
class MemoryLowering:
    """Lowers requests before any is preempted or evicted.

    Who has cold high tokens and no floor above is lowered: their tokens move from high to low
    pages, the least significant first (``Lower``). The worker answers with what that freed, and
    lowers its page limit by as much. Until then nothing more is booked for the request.
    """

    cluster: ClusterState
    bookings: BookingModel
    reasons: DecisionLog
    _pending: dict[str, PendingLowering] = field(default_factory=dict[str, PendingLowering])
    _in_vain: dict[str, float] = field(default_factory=dict[str, float])
    """When no request of an arena could be lowered."""

    def is_pending(self, entry: Entry) -> bool:
        """Whether the worker of a request is lowering it, and has not answered."""
        return entry.id in self._pending

    def forget(self, entry: Entry) -> None:
        """A request left its worker, or another one has it."""
        self._pending.pop(entry.id, None)

    def make_room(self, arena: str, short: int, now: float) -> bool:
        """Have requests of an arena lowered so that ``short`` bytes become free.

        Returns: whether any is being lowered; if not, memory must come from elsewhere
        """
        self._pending = {name: one for name, one in self._pending.items() if self._is_coming(name)}
        coming = sum(one.wanted for one in self._pending.values() if one.arena == arena)
        if now - self._in_vain.get(arena, -inf) < LOOK_AGAIN_S:
            return coming > 0
        chosen = requests_to_lower(self._gains(arena), short - coming) if coming < short else []
        for name, wanted in chosen:
            self._lower(self.cluster.requests[name], wanted)
        if not (coming or chosen):
            self._in_vain[arena] = now
        return bool(coming or chosen)

    def _is_coming(self, name: str) -> bool:
        """Whether a worker will answer a ``Lower``. A request whose worker died is not decoding."""
        entry = self.cluster.requests.get(name)
        return entry is not None and entry.state is State.DECODING

    def _gains(self, arena: str) -> list[tuple[int, str]]:
        """Expected bytes that each request of an arena can free, with its name; youngest first."""
        running = (one for one in self.cluster.requests.in_state(State.DECODING))
        able = [one for one in running if self._may_lower(one, arena)]
        able.sort(key=lambda one: (one.arrived, one.id), reverse=True)
        gains = [(self._gain(one), one.id) for one in able]
        return [one for one in gains if one[0] >= self.bookings.row_bytes]

    def _may_lower(self, entry: Entry, arena: str) -> bool:
        """Whether a request may be lowered. One that has booked its bound would free little."""
        place, booking = entry.placement, entry.booking
        return (
            place.work_arena == place.final_arena == arena
            and booking is not None
            and not booking.is_whole
            and booking.may_lower
            and not entry.is_preempt_sent
            and not self.is_pending(entry)
            and can_move(entry)
        )

    def _gain(self, entry: Entry) -> int:
        """Bytes that a request would probably free if all of its cold tokens were low."""
        booking = entry.booking
        low = self.bookings.plan_of(booking).low if booking else None
        if booking is None or low is None:
            return 0
        held, shared = self.cluster.ledger.held_of(entry.id), entry.sizes.shared
        return held - self.bookings.lowest(low, booking, shared) - booking.unlowerable

    def _lower(self, entry: Entry, wanted: int) -> None:
        booking = entry.booking
        assert booking is not None
        booking.lowerings += 1
        arena, number = entry.placement.final_arena, booking.lowerings
        self._pending[entry.id] = PendingLowering(number, arena, wanted)
        pages = -(-wanted // self.bookings.page_bytes)
        lower = Lower(request=entry.id, number=number, pages=pages)
        self.cluster.outbox.post(entry.worker, lower)

    def bound_by_low_pages(self, entry: Entry) -> None:
        """Bound a request that must have its bound booked by what it takes if it is lowered."""
        booking = entry.booking
        low = self.bookings.plan_of(booking).low if booking else None
        if booking is None or low is None or booking.lowers or not booking.may_lower:
            return
        if self.bookings.is_recomputable(booking, self.bookings.ahead(booking)):
            return
        least = self.bookings.lowered_bound(low, booking, entry.sizes.shared)
        bound = max(least, entry.sizes.grown)
        if bound < booking.bound.grown:
            booking.lowers, booking.bound = True, replace(booking.bound, grown=bound)

    def bound_by_high_pages(self, entry: Entry, tokens: int, held: int) -> None:
        """Bound a request anew that a worker could not keep within the bound of low pages."""
        booking = entry.booking
        assert booking is not None
        self.cluster.counters["growth:not_lowered"] += 1
        self.bookings.note(booking, tokens, held, entry.sizes.shared)
        bound = max(entry.sizes.grown, held + self.bookings.growth(booking))
        booking.lowers = booking.may_lower = booking.is_whole = False
        booking.bound = replace(booking.bound, grown=bound)

    def lowered(self, message: Lowered, sender: str, now: float) -> Entry | None:
        """A worker has lowered a request, or could not.

        Returns: the entry with the smaller booking; None if nothing is known of it
        """
        entry, pending = self.cluster.requests.get(message.request), None
        if entry is not None and (entry.worker, entry.state) == (sender, State.DECODING):
            pending = self._pending.get(entry.id)
            if not message.number:
                self._note(entry, message, "at_its_bound", now)
                return None
        if entry is None or pending is None or pending.number != message.number:
            self.cluster.counters["stray_lowered"] += 1
            return None
        self.forget(entry)
        if message.freed:
            self._shrink(entry, message)
            self._note(entry, message, "memory_short", now)
        freed = message.freed * self.bookings.page_bytes
        if freed < pending.wanted and entry.booking is not None:
            entry.booking.unlowerable += max(0, self._gain(entry))
        return entry

    def _shrink(self, entry: Entry, message: Lowered) -> None:
        """Book less for a request, by what it has freed, and bound what it may still take."""
        booking, page_bytes = entry.booking, self.bookings.page_bytes
        assert booking is not None
        freed, held = message.freed * page_bytes, message.pages * page_bytes
        booking.lowered += freed
        self.bookings.note(booking, message.tokens, held, entry.sizes.shared)
        bound = min(booking.bound.grown, held + self.bookings.growth(booking))
        grown = min(entry.sizes.grown - freed, bound)
        booking.bound, booking.is_whole = replace(booking.bound, grown=bound), grown >= bound
        entry.sizes = replace(entry.sizes, grown=grown)
        place, ledger = entry.placement, self.cluster.ledger
        ledger.book(
            entry.id, lines_after_encoding(entry.sizes, place.work_arena, place.final_arena)
        )
        ledger.bind(entry.id, bound)

    def _note(self, entry: Entry, message: Lowered, reason: str, now: float) -> None:
        """Update the bytes that a request holds, its report, the counters and the decision log."""
        page_bytes, report = self.bookings.page_bytes, entry.transfer.report
        self.cluster.ledger.hold(entry.id, message.pages * page_bytes)
        self.cluster.counters["growth:lowered"] += not entry.was_lowered
        entry.was_lowered = True
        if report is not None:
            entry.transfer.report = replace(report, lowered_tokens=message.lowered_tokens)
        self.cluster.counters["lowered_bytes"] += message.freed * page_bytes
        self.reasons.lowered(entry, reason, now)
