"""Books memory for requests as they grow, and makes room if it runs short."""

from dataclasses import dataclass, field, replace
from math import inf

from triptych.core.messages import (
    Evicted,
    Lowered,
    PageLimit,
    PagesWanted,
    Request,
)
from triptych.router.models.booking import Booking, BookingModel
from triptych.router.models.memory_estimate import RequestBytes
from triptych.router.models.overcommit import Need, Overcommit
from triptych.router.passes.cache_borrowing import CacheBorrowing
from triptych.router.passes.completion import RequestCompletion
from triptych.router.passes.eviction import Eviction, age_of
from triptych.router.passes.lowering import MemoryLowering
from triptych.router.snapshot import HeldBy
from triptych.router.state.byte_ledger import Lines, lines_after_encoding
from triptych.router.state.cluster_state import ClusterState
from triptych.router.state.request_table import (
    Entry,
    Placement,
    State,
    Transfer,
)

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

    def __post_init__(self) -> None:
        self.cluster.requests.on_end.append(self._forget)
        self._eviction = Eviction(
            self.cluster, self.completion, self.lowering, self.bookings, self._forget
        )

    # ---------------------------------------------------------------- admission

    def open(self, request: Request, bound: RequestBytes, left: int) -> Booking:
        """Make the booking of a request that arrives, or that is to be computed again."""
        # Log probabilities of a prompt are sent once, so it may not be computed again. Nor may a
        # prompt of which no token is dropped, where those of others are read in bounded memory.
        plan = self.bookings.model.plan.of_method(request.method)
        is_whole = plan.of_floor(request.floor) is not plan
        may_evict = request.sampling.prompt_logprobs < 0 and not is_whole
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
        memory = self._memory(arena)
        return self.overcommit.is_certain(
            entry.id, arena, self._most_bytes(entry), memory
        ) or self.overcommit.fits(entry.id, arena, self._need(entry), memory)

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
            self._eviction.preempt_for(entry, message.wanted * page_bytes, now, keeps_pages=False)
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
        for entry in sorted(self._asking.values(), key=age_of):
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
        victims = [one for one in waiting if self._eviction.can_evict(one)]
        if victims:
            self._eviction.evict(max(victims, key=age_of), now)

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
        left = short - self._eviction.coming_to(arena)
        if left <= 0 or self.lowering.make_room(arena, left, now):
            return
        is_late = now - self._short_since.get(arena, now) > ENCODING_S
        is_paused = now - booking.paused_at >= MAX_PAUSE_S
        if is_paused and (is_late or left > self._eviction.encoding_frees(arena)):
            self._eviction.preempt_for(entry, short, now)

    def lowered(self, message: Lowered, sender: str, now: float) -> None:
        """A worker has lowered a request, or could not: tell it the limit that is booked now."""
        entry = self.lowering.lowered(message, sender, now)
        if entry is not None and message.freed:
            self.limit_again(entry)
            self._count(entry)

    def may_wait(self, entry: Entry) -> bool:
        """Whether a request may be preempted for a more urgent one, and wait with its pages."""
        return not self.is_on or self._eviction.can_evict(entry)

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
            most_bytes = self._most_bytes(entry)
            self.overcommit.forecast(entry.id, arena, most_bytes, lambda: self._need(entry))

    @staticmethod
    def _most_bytes(entry: Entry) -> int:
        """The most that a request will hold in the arena of its decode worker."""
        booking = entry.booking
        if booking is None:
            return entry.sizes.grown
        raw = 0 if booking.is_encoded else entry.sizes.peak
        return max(booking.bound.grown, raw)

    def _forget(self, entry: Entry) -> None:
        self.lowering.forget(entry)
        self._asking.pop(entry.id, None)
        self._exhausted.pop(entry.id, None)
        self._eviction.forget(entry)
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
