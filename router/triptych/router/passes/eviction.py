"""Frees memory for growing requests: the youngest ones wait with their pages, or are evicted."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

from triptych.core.errors import Overloaded, StageLost
from triptych.core.messages import Evict, Preempt
from triptych.router.models.booking import BookingModel
from triptych.router.passes.completion import RequestCompletion
from triptych.router.passes.lowering import MemoryLowering
from triptych.router.passes.migration import can_move
from triptych.router.state.cluster_state import ClusterState
from triptych.router.state.request_table import BEFORE_DECODING, Entry, State

LOOK_AGAIN_S = 0.02
"""Seconds after which requests to preempt are looked for again, if too few were found."""


@dataclass
class Eviction:
    """Preempts or evicts requests younger than one that asks for memory in vain.

    Steps 4 to 6 of ``Growth``, which says when.
    """

    cluster: ClusterState
    completion: RequestCompletion
    lowering: MemoryLowering
    bookings: BookingModel
    on_evict: Callable[[Entry], None]
    """Called when the pages of a request will be freed."""
    _coming: dict[str, tuple[str, int]] = field(default_factory=dict[str, tuple[str, int]])
    """Bytes that requests which are being preempted will free, and their arena."""
    _looked: dict[str, float] = field(default_factory=dict[str, float])
    """When requests to preempt were last looked for, by arena."""

    def forget(self, entry: Entry) -> None:
        """A request has ended, waits with its pages or is computed again."""
        self._coming.pop(entry.id, None)

    def preempt_for(
        self, entry: Entry, short: int, now: float, *, keeps_pages: bool = True
    ) -> None:
        """Preempt as many requests younger than ``entry`` as free ``short`` bytes.

        ``keeps_pages``: whether memory that is booked and not held helps.
        """
        arena = entry.placement.final_arena
        if now - self._looked.get(arena, -inf) < LOOK_AGAIN_S:
            return
        self._looked[arena] = now
        short -= self.coming_to(arena)
        if short <= 0:
            return
        victims = self._victims(entry)
        if victims:
            self._preempt_youngest(victims, short, now, keeps_pages=keeps_pages)
        elif not self._goes_on(arena):
            self._give_up_youngest(entry, now)

    def _preempt_youngest(
        self, victims: Sequence[Entry], short: int, now: float, *, keeps_pages: bool
    ) -> None:
        """Let the youngest wait with its pages, if that frees ``short`` bytes; or evict some.

        It waits only if no other one waits so already: else more and more memory would serve
        nobody. If all together do not free enough, they run on as long as any request does.
        """
        first = victims[0]
        may_keep = keeps_pages and all(one.state is State.DECODING for one in victims)
        if may_keep and self._unused(first) >= short:
            self._preempt(first)
            return
        arena, booked_in = first.placement.final_arena, self.cluster.ledger.booked_in
        if sum(booked_in(one.id, arena) for one in victims) < short and self._goes_on(arena):
            return
        for victim in victims:
            if short <= 0:
                return
            short -= self.evict(victim, now)

    def _give_up_youngest(self, entry: Entry, now: float) -> None:
        """Fail the youngest request beside ``entry``, since none can be evicted and all wait.

        Only workers that did not keep two requests within their bounds of low pages lead here.
        """
        running = self.cluster.requests.in_state(State.DECODING)
        arena = entry.placement.final_arena
        others = [one for one in running if one.placement.final_arena == arena and one is not entry]
        if others:
            self.cluster.counters["growth:gave_up"] += 1
            error = Overloaded(
                "memory ran out for an answer that is too long to be computed again: send it again "
                "when there is less load, or raise pool.kv_cache_memory_bytes"
            )
            self.completion.fail(max(others, key=age_of), error, now)

    def _victims(self, entry: Entry) -> list[Entry]:
        """Requests of the same arena that may be preempted for ``entry``, in this order.

        The younger ones, those that wait with their pages first; then older ones that wait so: they
        may wait for the memory that ``entry`` has.
        """
        requests, arena = self.cluster.requests, entry.placement.final_arena
        running = [
            one
            for one in requests.in_state(State.DECODING)
            if one.placement.final_arena == arena
            and one.placement.work_arena == arena
            and not one.is_preempt_sent
            and not self.lowering.is_pending(one)
            and can_move(one)
            and self.can_evict(one)
            and age_of(one) > age_of(entry)
        ]
        waiting = [
            one
            for one in requests.in_state(State.WAITING)
            if one.waits_with_pages and one.placement.final_arena == arena and self.can_evict(one)
        ]
        running.sort(key=age_of, reverse=True)
        waiting.sort(key=age_of, reverse=True)
        younger = [one for one in waiting if age_of(one) > age_of(entry)]
        return [*younger, *running, *waiting[len(younger) :]]

    def _goes_on(self, arena: str) -> bool:
        """Whether a request of an arena runs or is prefilled, so that it ends or asks for more."""
        bookings = (
            one.booking
            for state in (State.PREFILLING, State.COMPRESSING, State.ENCODING, State.DECODING)
            for one in self.cluster.requests.in_state(state)
            if one.placement.final_arena == arena
        )
        return any(one is None or one.paused_at == inf for one in bookings)

    def coming_to(self, arena: str) -> int:
        """Bytes of an arena that requests which leave or are preempted will free."""
        self._coming = {name: due for name, due in self._coming.items() if self._is_coming(name)}
        preempted = sum(count for where, count in self._coming.values() if where == arena)
        leaving = self.cluster.requests.in_state(State.LEAVING)
        return preempted + sum(self.cluster.ledger.booked_in(one.id, arena) for one in leaving)

    def _is_coming(self, name: str) -> bool:
        """Whether a request is still being preempted."""
        entry = self.cluster.requests.get(name)
        return entry is not None and (entry.state is State.EVICTING or entry.is_preempt_sent)

    def encoding_frees(self, arena: str) -> int:
        """Bytes of an arena that prompts which have started will free once they are encoded."""
        ledger, requests = self.cluster.ledger, self.cluster.requests
        started = (one for state in BEFORE_DECODING for one in requests.in_state(state))
        return sum(
            max(0, ledger.booked_in(one.id, arena) - one.sizes.grown)
            for one in started
            if one.placement.work_arena == one.placement.final_arena == arena
        )

    def can_evict(self, entry: Entry) -> bool:
        """Whether a request may be computed again, now and after any token until it asks again."""
        booking = entry.booking
        if booking is None:
            return False
        if entry.waits_with_pages:
            return booking.may_evict and self.bookings.is_recomputable(booking, booking.tokens)
        return self.bookings.can_evict(booking)

    def _unused(self, entry: Entry) -> int:
        """Bytes that are booked for a running request and that it does not hold."""
        booked = self.cluster.ledger.booked_in(entry.id, entry.placement.final_arena)
        return max(0, booked - self.cluster.ledger.held_of(entry.id))

    def _preempt(self, victim: Entry) -> None:
        """Let a running request wait with its pages."""
        victim.is_preempt_sent = victim.is_preempted = True
        self._coming[victim.id] = victim.placement.final_arena, self._unused(victim)
        self.cluster.counters["growth:preempted"] += 1
        self.cluster.outbox.post(victim.worker, Preempt(requests=(victim.id,)))

    def evict(self, victim: Entry, now: float) -> int:
        """Have the pages of a request freed; returns their bytes."""
        booking, arena = victim.booking, victim.placement.final_arena
        booked = self.cluster.ledger.booked_in(victim.id, arena)
        if not victim.worker or booking is None:  # its worker died, and the pool keeps its pages
            self.completion.fail(victim, StageLost("decode"), now)
            return booked
        booking.evictions += 1
        self.cluster.counters["growth:evicted"] += 1
        evict = Evict(request=victim.id, number=booking.evictions)
        self.cluster.outbox.post(victim.worker, evict)
        self.on_evict(victim)
        self._coming[victim.id] = arena, booked
        victim.is_preempted = False
        self.cluster.requests.move(victim, State.EVICTING, now)
        return booked


def age_of(entry: Entry) -> tuple[float, str]:
    """Order of arrival, the oldest first."""
    return entry.arrived, entry.id
