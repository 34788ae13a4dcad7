"""Books memory for requests as they grow, and preempts the youngest ones if it runs short."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf

from triptych.core.errors import Overloaded, StageLost
from triptych.core.messages import (
    Evict,
    Evicted,
    Lowered,
    PageLimit,
    PagesWanted,
    Preempt,
    Request,
)
from triptych.router.models.booking import Booking, BookingModel
from triptych.router.models.memory_estimate import RequestBytes
from triptych.router.models.overcommit import Need, Overcommit
from triptych.router.passes.cache_borrowing import CacheBorrowing
from triptych.router.passes.completion import RequestCompletion
from triptych.router.passes.lowering import MemoryLowering
from triptych.router.passes.migration import can_move
from triptych.router.snapshot import HeldBy
from triptych.router.state.byte_ledger import Lines, lines_after_encoding
from triptych.router.state.cluster_state import ClusterState
from triptych.router.state.request_table import (
    BEFORE_DECODING,
    Entry,
    Placement,
    State,
    Transfer,
)

LOOK_AGAIN_S = 0.02
"""Seconds after which requests to preempt are looked for again, if too few were found."""
ENCODING_S = 5.0
"""Seconds for which a request that asks waits for the raw pages of prompts that will be encoded,
before others are preempted. Meanwhile no prompt starts, so their number only falls."""
MAX_PAUSE_S = 1.0
"""Seconds for which a request waits at its page limit before others are preempted for it. Often one
of them ends meanwhile."""
EXHAUSTED_AGAIN_S = 0.25
"""Seconds after which a worker tries again to get pages that its pool did not have."""


@dataclass
class Growth:
    """Bookings that follow what requests take.

    A request starts with the memory of its prompt and of a few tokens. Its decode worker asks for
    more before that is used up (``PagesWanted``), and pauses the request at its limit. While memory
    is short, no request of the arena starts or resumes, and the requests that ask are served in
    order of arrival:

    1. Cached prefixes are lent (``CacheBorrowing``).
    2. High tokens of running requests are stored as low ones (``MemoryLowering``).
    3. Raw pages of prompts that have started are awaited for ``ENCODING_S``.
    4. The youngest request behind the one that asks is preempted and waits with its pages, if what
       it has booked beyond them is enough and no other one waits so.
    5. Else the youngest ones are evicted, those that wait with their pages first: their pages are
       freed, and they are computed again later.
    6. If none can be evicted and all wait, the youngest one fails.

    Nobody is preempted or evicted while the one that asks still runs or has just paused.

    The first request that runs can always finish. Every other one is evicted for it, or has its
    whole bound booked and ends without needing more: a request that grows beyond the length at
    which it could be computed again gets its bound first (docs/decisions/0042 and 0047).
    """

    cluster: ClusterState
    completion: RequestCompletion
    borrowing: CacheBorrowing
    lowering: MemoryLowering
    bookings: BookingModel
    overcommit: Overcommit
    is_on: bool
    """Whether bookings follow forecasts; else every request has its bound booked."""
    short_bytes: int = 0
    """Bytes that the first request that asks lacks, with prefixes lent; 0: none does."""
    _asking: dict[str, Entry] = field(default_factory=dict[str, Entry])
    """Requests for which more is to be booked."""
    _exhausted: dict[str, float] = field(default_factory=dict[str, float])
    """Requests for which the pool had no pages, and when their workers are to try again."""
    _short: set[str] = field(default_factory=set[str])
    """Arenas where a request asks in vain."""
    _short_since: dict[str, float] = field(default_factory=dict[str, float])
    """Since when a request asks in vain, by arena."""
    _coming: dict[str, tuple[str, int]] = field(default_factory=dict[str, tuple[str, int]])
    """Bytes that requests which are being preempted will free, and their arena."""
    _looked: dict[str, float] = field(default_factory=dict[str, float])
    """When requests to preempt were last looked for, by arena."""

    def __post_init__(self) -> None:
        self.cluster.requests.on_end.append(self._forget)

    # ---------------------------------------------------------------- admission

    def open(self, request: Request, bound: RequestBytes, left: int) -> Booking:
        """Make the booking of a request that arrives, or that is to be computed again."""
        # Log probabilities of a prompt are sent once, so it may not be computed again.
        may_evict = request.sampling.prompt_logprobs < 0
        known = request.known_tokens
        is_fixed = not (self.is_on and may_evict)
        return Booking(
            bound=bound,
            prompt_tokens=known,
            most_tokens=known + left,
            tenant=request.tenant,
            profile=self._profile(request),
            method=request.method,
            written=len(request.output_tokens),
            is_fixed=is_fixed,
            is_whole=is_fixed,
            is_roomy=self._is_roomy(),
            may_evict=may_evict,
            may_lower=not is_fixed and self._may_lower(request),
        )

    def _is_roomy(self) -> bool:
        """Whether half of the memory of all arenas is free."""
        load_index, capacity = self.cluster.load_index, self.cluster.ledger.capacity_bytes
        return 2 * load_index.used_bytes <= len(load_index.arenas) * capacity

    def _may_lower(self, request: Request) -> bool:
        """Whether the floors of a request allow that its high tokens become low."""
        plan = self.bookings.model.plan
        is_allowed = plan.may_lower(request.method, request.max_kl, request.known_tokens)
        return request.floor == "low" and is_allowed

    def _profile(self, request: Request) -> str:
        """Key of the statistics of page bytes: the policy, and the floor if there is one."""
        policy = self.bookings.model.plan.of_method(request.method).policy.name
        return policy if request.floor == "low" else f"{policy}, floor {request.floor}"

    def first_tokens(self, booking: Booking) -> int:
        """Output tokens to book when a request starts."""
        left = booking.most_tokens - booking.prompt_tokens
        return left if booking.is_fixed else self.bookings.first_tokens(booking)

    def may_start(self, entry: Entry, arena: str) -> bool:
        """Whether a request may start, or go on, by what the others will probably need."""
        if arena in self._short:
            return False
        if not self.is_on:
            return True
        return self.overcommit.fits(entry.id, arena, self._need(entry), self._memory(arena))

    def startable(self, entry: Entry, arena: str, most: int) -> int:
        """How many requests like a waiting one may start, of ``most``."""
        if arena in self._short:
            return 0
        if not self.is_on:
            return min(most, self.cluster.ledger.free(arena) // max(1, entry.sizes.peak))
        return self.overcommit.room(arena, self._need(entry), self._memory(arena), most)

    def spare_bytes(self) -> int:
        """Bytes that new requests may take in the decode arena with the most.

        0 while those that run ask in vain. Before any worker is there, all of them.
        """
        arenas = self.cluster.membership.arenas_with("decode")
        if not arenas:
            return self.cluster.ledger.capacity_bytes
        ledger = self.cluster.ledger
        enough = (one for one in arenas if one not in self._short)
        return max(0, max((self._memory(one) - ledger.booked(one) for one in enough), default=0))

    def _memory(self, arena: str) -> int:
        """Bytes that requests may use in an arena, with those that the prefix cache would lend."""
        ledger = self.cluster.ledger
        is_alone = len(self.cluster.load_index.arenas) == 1
        lendable = self.borrowing.limit_bytes if is_alone else 0
        return ledger.capacity_bytes + max(lendable, ledger.lent.get(arena, 0))

    def started(self, entry: Entry) -> None:
        """A request was booked."""
        booking = entry.booking
        if booking is not None and not booking.is_fixed:
            self.cluster.ledger.bind(entry.id, booking.bound.peak)
        self._count(entry)

    def prefilled(self, entry: Entry) -> None:
        """The prompt of a request is in raw pages."""
        self.cluster.ledger.hold(entry.id, entry.sizes.raw)

    def planned(self, entry: Entry, own: int, shared: int) -> None:
        """The pages of a compressed prompt are counted: adjust its sizes."""
        entry.sizes = entry.sizes.corrected(own, shared)
        booking = entry.booking
        if booking is None or booking.is_fixed:
            return
        booking.bound = booking.bound.corrected(own, shared)
        self.bookings.note(booking, booking.prompt_tokens, own, shared)
        grown = min(entry.sizes.grown, self.bookings.grown(booking, shared))
        self._resize(entry, max(grown, own))
        self.cluster.ledger.bind(entry.id, max(entry.sizes.peak, booking.bound.grown))

    def encoded(self, entry: Entry) -> None:
        """The pages of a compressed prompt are complete, and the raw ones are free."""
        self.cluster.ledger.hold(entry.id, entry.sizes.compressed)
        booking = entry.booking
        if booking is not None:
            booking.is_encoded = True
            if not booking.is_fixed:
                self.cluster.ledger.bind(entry.id, booking.bound.grown)
        self._count(entry)

    def fetched(self, entry: Entry) -> None:
        """A request has pages of its own in another arena, instead of shared ones."""
        if entry.booking is not None:
            entry.booking.bound = entry.booking.bound.moved()

    def limit(self, entry: Entry, address: str) -> None:
        """Tell a decode worker how many pages a request may hold, before it gets the request."""
        self.lowering.forget(entry)
        self._send_limit(entry, address)

    def _send_limit(self, entry: Entry, address: str) -> None:
        booking = entry.booking
        if booking is not None and (booking.lowers or not booking.is_whole):
            pages = self._final_bytes(entry) // self.bookings.page_bytes
            lowers = booking.lowers and booking.is_whole
            tokens = 0 if lowers else booking.limit_tokens
            limit = PageLimit(request=entry.id, pages=pages, tokens=tokens, lowers=lowers)
            self.cluster.outbox.post(address, limit)

    # ---------------------------------------------------------------- growth

    def ask(self, message: PagesWanted, sender: str, now: float) -> None:
        """A decode worker wants more pages for a request."""
        entry = self.cluster.requests.get(message.request)
        if entry is None or entry.worker != sender or entry.state is not State.DECODING:
            self.cluster.counters["stray_pages_wanted"] += 1
            return
        page_bytes = self.bookings.page_bytes
        held = message.pages * page_bytes
        self.cluster.ledger.hold(entry.id, held)
        if message.is_exhausted:
            self.cluster.counters["pool_exhausted"] += 1
            self._exhausted[entry.id] = now + EXHAUSTED_AGAIN_S
            self._preempt_for(entry, message.wanted * page_bytes, now, keeps_pages=False)
            return
        booking = entry.booking
        if booking is not None and booking.lowers and booking.is_whole and message.wanted:
            self.lowering.bound_by_high_pages(entry, message.tokens, held)
        if booking is None or booking.is_whole:
            self.limit_again(entry)
            return
        self.bookings.note(booking, message.tokens, held, self._shared(entry))
        booking.lacks, booking.asks = message.wanted * page_bytes, True
        if message.wanted or message.tokens >= booking.limit_tokens:
            booking.paused_at = min(booking.paused_at, now)
        self._asking[entry.id] = entry

    def run(self, now: float) -> None:
        """Book what requests ask for, as far as memory goes; else make room for the first."""
        if not (self._asking or self._exhausted or self._short):
            return
        self.short_bytes = 0
        self._short.clear()
        self._try_again(now)
        self._serve(now)
        self._short_since = {arena: self._short_since.get(arena, now) for arena in self._short}

    def _serve(self, now: float) -> None:
        """Book for the requests that ask, in order of arrival, up to the first in vain."""
        for entry in sorted(self._asking.values(), key=_age):
            arena = entry.placement.final_arena
            if entry.state is not State.DECODING or entry.is_preempt_sent or arena in self._short:
                continue
            if self.lowering.is_pending(entry):
                self._short.add(arena)
                continue
            if short := self._extend(entry):
                self._short.add(arena)
                self.cluster.counters["growth:short"] += 1
                self._make_room(entry, short, now)

    def _try_again(self, now: float) -> None:
        """Let workers try again whose pool had no pages."""
        for name, due in list(self._exhausted.items()):
            entry = self.cluster.requests.get(name)
            if entry is None or entry.state is not State.DECODING or due <= now:
                del self._exhausted[name]
            if entry is not None and entry.state is State.DECODING:
                self._short.add(entry.placement.final_arena)
                if due <= now and not self.lowering.is_pending(entry):
                    self.limit_again(entry)

    def relieve(self, blocked_reason: HeldBy, now: float) -> None:
        """Evict a request that waits with its pages, if nothing runs and nothing can start."""
        requests = self.cluster.requests
        if not self.is_on or blocked_reason != "no_bytes" or requests.in_work:
            return
        if requests.count(State.LEAVING):
            return
        waiting = [one for one in requests.in_state(State.WAITING) if one.waits_with_pages]
        victims = [one for one in waiting if self.can_evict(one)]
        if victims:
            self._evict(max(victims, key=_age), now)

    def limit_again(self, entry: Entry) -> None:
        """Tell the worker of a running request its limit."""
        booking = entry.booking
        if booking is None or (booking.is_whole and not booking.lowers):
            self.cluster.outbox.post(entry.worker, PageLimit(request=entry.id, pages=0))
        else:
            self._send_limit(entry, entry.worker)

    def _extend(self, entry: Entry) -> int:
        """Book more for a request; returns the bytes that are missing, 0 if it was booked."""
        booking = entry.booking
        assert booking is not None
        ledger, arena = self.cluster.ledger, entry.placement.final_arena
        self.lowering.bound_by_low_pages(entry)
        booking.is_roomy = 2 * ledger.free(arena) >= ledger.capacity_bytes
        grown, lines = self._growth_of(entry, booking)
        if booking.is_roomy and not ledger.fits(entry.id, lines):
            booking.is_roomy = False
            grown, lines = self._growth_of(entry, booking)
        if not ledger.book(entry.id, lines):
            short = lines[arena] - ledger.booked_in(entry.id, arena) - ledger.free(arena)
            return max(1, short)
        self._resize(entry, grown)
        ledger.bind(entry.id, max(grown, booking.bound.grown))
        del self._asking[entry.id]
        booking.asks, booking.lacks, booking.paused_at = False, 0, inf
        self.cluster.counters["growth:booked"] += 1
        self.limit_again(entry)
        self._count(entry)
        return 0

    def _growth_of(self, entry: Entry, booking: Booking) -> tuple[int, Lines]:
        """Bytes to book for a running request that asks, and where."""
        grown = max(entry.sizes.grown, self.bookings.grown(booking, self._shared(entry)))
        return grown, self._lines(entry, replace(entry.sizes, grown=grown))

    def _resize(self, entry: Entry, grown: int) -> None:
        """Set what is booked for a request in the decode stage, and the tokens that it is for."""
        booking = entry.booking
        assert booking is not None
        entry.sizes = replace(entry.sizes, grown=grown)
        booking.is_whole = grown >= booking.bound.grown
        booking.limit_tokens = self.bookings.ahead(booking)

    # ---------------------------------------------------------------- shortage

    def _make_room(self, entry: Entry, short: int, now: float) -> None:
        """Have prefixes lent, requests lowered, or ones younger than ``entry`` preempted.

        None is preempted while ``entry`` still runs, or soon after it paused.
        """
        self.short_bytes = max(self.short_bytes, short)
        booking = entry.booking
        assert booking is not None
        if self.borrowing.may_lend(short, now):
            return
        arena = entry.placement.final_arena
        left = short - self._coming_to(arena)
        if left <= 0 or self.lowering.make_room(arena, left, now):
            return
        is_late = now - self._short_since.get(arena, now) > ENCODING_S
        is_paused = now - booking.paused_at >= MAX_PAUSE_S
        if is_paused and (is_late or left > self._encoding_frees(arena)):
            self._preempt_for(entry, short, now)

    def lowered(self, message: Lowered, sender: str, now: float) -> None:
        """A worker has lowered a request, or could not: tell it the limit that is booked now."""
        entry = self.lowering.lowered(message, sender, now)
        if entry is not None and message.freed:
            self.limit_again(entry)
            self._count(entry)

    def _preempt_for(
        self, entry: Entry, short: int, now: float, *, keeps_pages: bool = True
    ) -> None:
        """Preempt as many requests younger than ``entry`` as free ``short`` bytes.

        ``keeps_pages``: whether memory that is booked and not held helps.
        """
        arena = entry.placement.final_arena
        if now - self._looked.get(arena, -inf) < LOOK_AGAIN_S:
            return
        self._looked[arena] = now
        short -= self._coming_to(arena)
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
            short -= self._evict(victim, now)

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
            self.completion.fail(max(others, key=_age), error, now)

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
            and _age(one) > _age(entry)
        ]
        waiting = [
            one
            for one in requests.in_state(State.WAITING)
            if one.waits_with_pages and one.placement.final_arena == arena and self.can_evict(one)
        ]
        running.sort(key=_age, reverse=True)
        waiting.sort(key=_age, reverse=True)
        younger = [one for one in waiting if _age(one) > _age(entry)]
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

    def _coming_to(self, arena: str) -> int:
        """Bytes of an arena that requests which leave or are preempted will free."""
        self._coming = {name: due for name, due in self._coming.items() if self._is_coming(name)}
        preempted = sum(count for where, count in self._coming.values() if where == arena)
        leaving = self.cluster.requests.in_state(State.LEAVING)
        return preempted + sum(self.cluster.ledger.booked_in(one.id, arena) for one in leaving)

    def _encoding_frees(self, arena: str) -> int:
        """Bytes of an arena that prompts which have started will free once they are encoded."""
        ledger, requests = self.cluster.ledger, self.cluster.requests
        started = (one for state in BEFORE_DECODING for one in requests.in_state(state))
        return sum(
            max(0, ledger.booked_in(one.id, arena) - one.sizes.grown)
            for one in started
            if one.placement.work_arena == one.placement.final_arena == arena
        )

    def _is_coming(self, name: str) -> bool:
        """Whether a request is still being preempted."""
        entry = self.cluster.requests.get(name)
        return entry is not None and (entry.state is State.EVICTING or entry.is_preempt_sent)

    def can_evict(self, entry: Entry) -> bool:
        """Whether a request may be computed again, now and after any token until it asks again."""
        booking = entry.booking
        if booking is None:
            return False
        if entry.waits_with_pages:
            return booking.may_evict and self.bookings.is_recomputable(booking, booking.tokens)
        return self.bookings.can_evict(booking)

    def may_wait(self, entry: Entry) -> bool:
        """Whether a request may be preempted for a more urgent one, and wait with its pages."""
        return not self.is_on or self.can_evict(entry)

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

    def _evict(self, victim: Entry, now: float) -> int:
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
        self._forget(victim)
        self._coming[victim.id] = arena, booked
        victim.is_preempted = False
        self.cluster.requests.move(victim, State.EVICTING, now)
        return booked

    def evicted(self, message: Evicted, sender: str) -> Entry | None:
        """A worker has freed the pages of a request, which is to be computed again.

        Returns: its entry, without sizes for the new start; None if nothing is known of it
        """
        entry = self.cluster.requests.get(message.request)
        if (
            entry is None
            or entry.booking is None
            or (entry.state, entry.worker) != (State.EVICTING, sender)
            or message.number != entry.booking.evictions
        ):
            self.cluster.counters["stray_evicted"] += 1
            return None
        more = message.output_tokens or entry.transfer.output_tokens
        request = entry.request
        entry.request = replace(request, output_tokens=request.output_tokens + more)
        self.cluster.ledger.release(entry.id)
        self._forget(entry)
        entry.placement, entry.transfer = Placement(), Transfer()
        entry.worker, entry.stage = "", "prefill"
        self.cluster.counters["recomputed"] += 1
        return entry

    def preempted(self, entry: Entry, kept: int, tokens: int) -> None:
        """A request waits with its pages: set what it needs to go on."""
        booking = entry.booking
        self._forget(entry)
        if booking is None or booking.is_fixed:
            return
        self.cluster.ledger.hold(entry.id, kept)
        booking.asks, booking.lacks, booking.paused_at = False, 0, inf
        booking.is_whole = False
        booking.tokens, booking.held = tokens, kept
        self._resize(entry, self.bookings.grown(booking, self._shared(entry)))
        if self.is_on:
            need = Need.constant(kept, self.overcommit.capacity_bytes)
            self.overcommit.put(entry.id, entry.placement.final_arena, need)

    def resumed(self, entry: Entry) -> None:
        """A request goes on in a decode worker."""
        self._count(entry)

    def finished(self, entry: Entry, output_tokens: int) -> None:
        """An answer is complete."""
        booking = entry.booking
        if booking is not None and self.is_on:
            limit = entry.request.sampling.max_tokens
            self.bookings.note_end(booking, output_tokens, limit)

    # ---------------------------------------------------------------- figures

    def _need(self, entry: Entry) -> Need:
        booking = entry.booking
        if booking is None:
            return Need.constant(entry.sizes.grown, self.overcommit.capacity_bytes)
        return self.bookings.need(booking, entry.sizes)

    def _count(self, entry: Entry) -> None:
        """Count what a started request will need."""
        if self.is_on:
            arena = entry.placement.final_arena
            self.overcommit.forecast(entry.id, arena, lambda: self._need(entry))

    def _forget(self, entry: Entry) -> None:
        self.lowering.forget(entry)
        self._asking.pop(entry.id, None)
        self._exhausted.pop(entry.id, None)
        self._coming.pop(entry.id, None)
        self.overcommit.drop(entry.id)

    @staticmethod
    def _lines(entry: Entry, sizes: RequestBytes) -> Lines:
        place = entry.placement
        return lines_after_encoding(sizes, place.work_arena, place.final_arena)

    def _final_bytes(self, entry: Entry) -> int:
        """Bytes that a request may hold in the arena of its decode worker."""
        return self._lines(entry, entry.sizes)[entry.placement.final_arena]

    @staticmethod
    def _shared(entry: Entry) -> int:
        return entry.sizes.shared


def _age(entry: Entry) -> tuple[float, str]:
    """Order of arrival, the oldest first."""
    return entry.arrived, entry.id
