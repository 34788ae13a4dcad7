"""Moves requests on to their next stage, whenever something has changed."""

from collections import Counter
from dataclasses import dataclass, field, replace

from triptych.core.config import RouterConfig
from triptych.core.messages import CompressItem, Join, Prefix, Resume, pack_tokens
from triptych.router.models.memory_estimate import RequestBytes
from triptych.router.passes.decision_log import DecisionLog
from triptych.router.passes.placement_view import Placer
from triptych.router.policies.batch_gates import Schedule
from triptych.router.policies.placement import Choice
from triptych.router.snapshot import Budget, HeldBy
from triptych.router.state.byte_ledger import Lines, lines_after_encoding, lines_before_encoding
from triptych.router.state.cluster_state import ClusterState
from triptych.router.state.request_table import Entry, State

MOVABLE = (State.ORPHANED, State.COMPRESSED, State.PLANNED, State.PREFILLED, State.WAITING)
"""States in which a request waits for the router; those nearest to the end come first."""


ENCODER_GRACE_S = 30.0
"""Time for which prompts that are encoded layer by layer wait for a compressor after one died."""
ROUND_REQUESTS = 4
"""Requests that the policy is asked for at a time: what it chose is lost when workers are full."""


@dataclass
class Dispatch:
    """One pass over all that could move, in a fixed order."""

    books: ClusterState
    schedule: Schedule
    config: RouterConfig
    placer: Placer
    keeps_prefixes: bool = False
    """Whether the pool keeps prefixes of prompts."""
    blocked_reason: HeldBy = ""
    """Why the first of the waiting line did not start at the last pass."""
    reasons: DecisionLog = field(init=False)

    def __post_init__(self) -> None:
        self.reasons = DecisionLog(self.books)

    def run(self, now: float) -> None:
        """Send on every request that can go on."""
        self.blocked_reason = ""
        if not self.books.requests.has_any(MOVABLE):
            return
        self.books.roster.refresh(now)
        self._resume_all(now)
        self._join_all(now)
        self._encode_all(now)
        self._compress_all(now)
        self.blocked_reason = self._admit(now)

    def adjust(self) -> None:
        """Begin another round: batch sizes follow what waits and what is free."""
        requests, roster = self.books.requests, self.books.roster
        capacity = len(roster.arenas) * self.books.ledger.capacity_bytes
        free_share = 1.0 - roster.used_bytes / capacity if capacity else 1.0
        self.schedule = self.schedule.adjusted(
            requests.count(State.WAITING), requests.count(State.PREFILLED), free_share
        )

    # ---------------------------------------------------------------- orphaned -> decoding

    def _resume_all(self, now: float) -> None:
        orphans = self.books.requests.in_state(State.ORPHANED)
        running = self._running() if orphans else Counter[str]()
        for entry in orphans:
            address = self.books.roster.decode_in(entry.final_arena)
            if address is not None and self.schedule.decode.has_room(running[address]):
                running[address] += 1
                self._resume(entry, address, now)

    def _resume(self, entry: Entry, address: str, now: float) -> None:
        entry.worker, entry.decode, entry.stage = address, address, "decode"
        self.books.outbox.post(
            address, Resume(previous_worker=entry.previous_worker, join=join_of(entry, now))
        )
        self.reasons.chosen(entry, "resume", "worker_lost", address, now)
        self.books.requests.move(entry, State.DECODING, now)

    def _running(self) -> Counter[str]:
        """Requests that were sent to each decode worker."""
        return Counter(entry.decode for entry in self.books.requests.in_state(State.DECODING))

    # ---------------------------------------------------------------- compressed -> decoding

    def _join_all(self, now: float) -> None:
        ready = list[Entry]()
        for entry in self.books.requests.in_state(State.COMPRESSED):
            if not entry.decode:  # the worker that was chosen died
                entry.decode = (
                    self.books.roster.decode_in(entry.final_arena)
                    or self._decode_worker_elsewhere(entry)
                    or ""
                )
                self.books.requests.touch(entry)
            if entry.decode:
                ready.append(entry)
        if self.schedule.decode.most is not None:
            ready = self._fixed_batches(ready, self.schedule.decode.most, now)
        for entry in ready:
            self._join(entry, now)

    def _fixed_batches(self, ready: list[Entry], size: int, now: float) -> list[Entry]:
        """Of those that could join, whole batches for decode workers that have ended theirs."""
        at = dict[str, list[Entry]]()
        for entry in ready:
            at.setdefault(entry.decode, []).append(entry)
        if not at:
            return []
        busy = self._running()
        return [
            entry
            for address, batch in at.items()
            if address not in busy and self.schedule.decode.opens(len(batch), now - batch[0].since)
            for entry in batch[:size]
        ]

    def _join(self, entry: Entry, now: float) -> None:
        entry.source_worker, entry.worker, entry.stage = entry.worker, entry.decode, "decode"
        self.books.outbox.post(
            entry.worker, replace(join_of(entry, now), previous_worker=entry.previous_worker)
        )
        self.books.requests.move(entry, State.DECODING, now)

    # ---------------------------------------------------------------- planned -> encoding

    def _encode_all(self, now: float) -> None:
        """Choose decode workers, in the order of planning: nobody overtakes here."""
        while (entry := self.books.requests.first(State.PLANNED)) is not None:
            address = self._decode_worker(entry)
            if address is None:
                return
            arena = self.books.roster.arena_of(address)
            reason = "most_free" if arena == entry.final_arena else "another_arena"
            self.reasons.chosen(entry, "decode", reason, address, now)
            if arena != entry.final_arena:
                self.books.ledger.book(entry.id, self._lines(entry, final=arena))
                entry.final_arena = arena
            entry.decode = address
            self._encode(entry, arena, now)

    def _encode(self, entry: Entry, arena: str, now: float) -> None:
        assert entry.handle is not None
        self.books.outbox.encode(entry.worker, arena or entry.handle.lease_ref.arena, entry.id)
        self.books.requests.move(entry, State.ENCODING, now)

    def _decode_worker(self, entry: Entry) -> str | None:
        """The best decode worker, wherever the final pages of a request can be booked."""

        def fits(arena: str) -> bool:
            return self.books.ledger.fits(entry.id, self._lines(entry, final=arena))

        own = {entry.raw_arena, entry.work_arena, entry.final_arena}
        return self.books.roster.decode(own, fits)

    def _lines(self, entry: Entry, *, final: str) -> Lines:
        """What a request books if it is decoded in the arena ``final``."""
        return lines_before_encoding(entry.sizes, entry.raw_arena, entry.work_arena, final)

    def _decode_worker_elsewhere(self, entry: Entry) -> str | None:
        """The best decode worker that can fetch the final pages, which are booked there then.

        Only for pages that were to be fetched anyway: if they lie where a decode worker just died,
        their pool may be dead as well.
        """
        if entry.work_arena == entry.final_arena:
            return None
        ledger, roster = self.books.ledger, self.books.roster

        def lines(arena: str) -> Lines:
            return lines_after_encoding(entry.sizes, entry.work_arena, arena)

        own = {entry.work_arena, entry.final_arena}
        address = roster.decode(own, lambda arena: ledger.fits(entry.id, lines(arena)))
        if address is not None:
            entry.final_arena = roster.arena_of(address)
            ledger.book(entry.id, lines(entry.final_arena))
        return address

    # ---------------------------------------------------------------- prefilled -> compressing

    def _compress_all(self, now: float) -> None:
        if self.books.roster.compressor("") is None:
            return
        ready, gate = self.books.requests.in_state(State.PREFILLED), self.schedule.compress
        if gate.most is not None:
            self._compress_batches(ready, gate.most, now)
            return
        for entry in ready:
            address = self._compressor(entry)
            if address is not None and self._book_work(entry, address):
                self._compress(entry, address, now)

    def _compress_batches(self, ready: list[Entry], size: int, now: float) -> None:
        """Send whole batches to compressors that have nothing else, for each arena its own."""
        of_arena = dict[str, list[Entry]]()
        for entry in ready:
            of_arena.setdefault(entry.work_arena, []).append(entry)
        for rest in of_arena.values():
            while rest and self.schedule.compress.opens(len(rest), now - rest[0].since):
                address = self._compressor(rest[0])
                if address is None:
                    break
                for entry in rest[:size]:
                    if self._book_work(entry, address):
                        self._compress(entry, address, now)
                del rest[:size]

    def _compress(self, entry: Entry, address: str, now: float) -> None:
        assert entry.handle is not None
        reason = "at_its_worker" if address == entry.worker else "fewest_tokens"
        if entry.encoder:
            reason = "has_its_layers"
        self.reasons.chosen(entry, "compress", reason, address, now)
        entry.source_worker, entry.worker, entry.stage = entry.worker, address, "compress"
        entry.encoder = ""
        item = CompressItem(request=entry.id, handle=entry.handle, prefix=self._prefix(entry))
        self.books.outbox.compress(address, item)
        self.books.requests.move(entry, State.COMPRESSING, now)

    def _compressor(self, entry: Entry) -> str | None:
        """A compressor where the request has booked one, or anywhere if none lives there."""
        if entry.encoder:
            return entry.encoder
        roster = self.books.roster
        is_fixed = self.schedule.compress.most is not None
        choose = roster.idle_compressor if is_fixed else roster.compressor
        arena = entry.work_arena if roster.has_compressor(entry.work_arena) else None
        return choose(entry.worker, arena)

    def _book_work(self, entry: Entry, address: str) -> bool:
        """Book what compressing at ``address`` takes; False, and nothing changes, if it cannot."""
        arena = self.books.roster.arena_of(address)
        if arena != entry.work_arena:
            lines = lines_before_encoding(entry.sizes, entry.raw_arena, arena, entry.final_arena)
            if not self.books.ledger.book(entry.id, lines):
                return False
            entry.work_arena = arena
        return True

    def _work_arena(self, raw_arena: str) -> str:
        """Where raw pages will be compressed: where they are, if that can be.

        Raw pages are what costs most to send.
        """
        roster = self.books.roster
        if roster.has_compressor(raw_arena):
            return raw_arena
        address = roster.compressor("")
        return raw_arena if address is None else roster.arena_of(address)

    def _prefix(self, entry: Entry) -> Prefix | None:
        """What the compressor may keep of a prompt for later requests."""
        if not self.keeps_prefixes:
            return None
        request = entry.request
        return Prefix(
            tokens=pack_tokens(request.known),
            cache_salt=request.cache_salt,
            tenant=request.tenant,
            token_s=entry.token_s,
            session=request.session,
            cached_tokens=entry.hit_tokens,
        )

    # ---------------------------------------------------------------- waiting -> prefilling

    def _admit(self, now: float) -> HeldBy:
        """Start as many waiting requests as bytes, decode slots and prefill workers allow."""
        line, gate, roster = self.books.requests.line, self.schedule.prefill, self.books.roster
        limit = self.config.prefill_batch_tokens if gate.most is None else 0
        while (oldest := line.oldest_arrival()) is not None:
            if gate.most is not None and not gate.opens(len(line), now - oldest):
                return "gathering"
            if not roster.prefill_has_room(1, limit):
                return "prefill_busy" if roster.has_stage("prefill") else "no_prefill_worker"
            # A request is let in only if a decode slot will be free for it. Otherwise finished
            # prompts would pile up in raw pages, the most expensive form that they ever have.
            slots = roster.open_slots - roster.needs_slot
            if slots <= 0:
                return "no_decode_slot"
            wanted = min(slots, gate.most or ROUND_REQUESTS)
            batch = self._batch(wanted, now)
            started, blocked_reason = self._start_all(batch, now)
            if blocked_reason and (started == 0 or gate.most is None):
                return blocked_reason
            if started < wanted and gate.most is None:
                return "no_bytes" if len(line) else ""
            if started == 0:
                return "no_bytes"
        return ""

    def _batch(self, wanted: int, now: float) -> list[Entry]:
        """Ask the policy. It sees all arenas as one; ``_start`` checks each for itself."""
        requests, roster = self.books.requests, self.books.roster
        free = len(roster.arenas) * self.books.ledger.capacity_bytes - roster.used_bytes
        budget = Budget(free_bytes=free, max_requests=wanted)
        chosen = self.schedule.choose(requests.line.at(now), budget)
        return [requests[one.id] for one in chosen]

    def _start_all(self, batch: list[Entry], now: float) -> tuple[int, HeldBy]:
        """Start requests up to the first that cannot; how many, and why no more.

        A batch of fixed size goes to one worker that has nothing else.
        """
        is_fixed = self.schedule.prefill.most is not None
        together = ""
        for started, entry in enumerate(batch):
            if entry.is_preempted:
                if not self._go_on(entry, now):
                    return started, "no_bytes"
                continue
            choice, blocked_reason = self._reader(entry, now, is_fixed=is_fixed, together=together)
            if choice is None:
                return started, blocked_reason
            self._start(entry, choice, now)
            together = choice.worker if is_fixed else ""
        return len(batch), ""

    def _go_on(self, entry: Entry, now: float) -> bool:
        """Let a request that was set aside join again; False if that cannot be."""
        address = self.books.roster.decode_in(entry.final_arena)
        lines = lines_after_encoding(entry.sizes, entry.final_arena, entry.final_arena)
        if address is None or not self.books.ledger.book(entry.id, lines):
            return False
        entry.decode, entry.is_preempted = address, False
        self.books.requests.move(entry, State.COMPRESSED, now)
        self._join(entry, now)
        return True

    def _reader(
        self, entry: Entry, now: float, *, is_fixed: bool, together: str
    ) -> tuple[Choice | None, HeldBy]:
        """Who reads a prompt: the worker that its batch goes to, or whom the policy says.

        If it is nobody, then why.
        """

        def fits(arena: str) -> bool:
            return self._final_arena(entry, arena, now) is not None

        if self._lacks_encoder(entry, now):
            return None, "no_compressor"
        if together:
            has_bytes = fits(self.books.roster.arena_of(together))
            return (Choice(together, "its_batch"), "") if has_bytes else (None, "no_bytes")
        limit = 0 if is_fixed else self.config.prefill_batch_tokens
        entry.ask = entry.ask or self.placer.ask(entry.request)
        snapshot = self.placer.snapshot(entry.ask, limit, fits, now)
        if not len(snapshot):
            return None, "prefill_busy"
        if not self._could_fit(entry.sizes):
            return None, "no_bytes"
        choice = self.placer.choose(snapshot)
        if choice is not None:
            return choice, ""
        waits_by_choice = any(snapshot.takes(worker) for worker in snapshot)
        return None, "prefill_busy" if waits_by_choice else "no_bytes"

    def _could_fit(self, sizes: RequestBytes) -> bool:
        """Whether the emptiest arenas have room; if not, no arena has, and none is asked."""
        roster, ledger = self.books.roster, self.books.ledger
        raw, final = roster.most_free_arena(), roster.final_arena(set(), lambda _: True)
        if raw is None or final is None:
            return False
        return sizes.raw <= ledger.free(raw) and sizes.grown <= ledger.free(final)

    def _start(self, entry: Entry, choice: Choice, now: float) -> None:
        """Book a request and send it to a prefill worker."""
        address = choice.worker
        arena, line = self.books.roster.arena_of(address), self.books.requests.line
        reason, place = self._reason(entry, now), (len(line), line.older(entry.id))
        seen = self.reasons.looked_at("prefill")
        entry.raw_arena, entry.worker, entry.stage = arena, address, "prefill"
        entry.work_arena = self._work_arena(arena)
        entry.final_arena = self._final_arena(entry, arena, now) or ""
        if self._goes_in_parts(entry, arena, now):
            entry.encoder = self.books.roster.compressor(address, arena) or ""
        else:
            entry.sizes = entry.whole or entry.sizes
        self.books.ledger.book(entry.id, self._lines(entry, final=entry.final_arena))
        if entry.ask is not None:
            entry.cached_tokens = self.placer.sent(entry.ask, arena)
        self.books.outbox.prefill(address, entry.request, entry.encoder)
        self.books.requests.move(entry, State.PREFILLING, now)
        self.reasons.started(entry, reason, choice.reason, place, seen)
        entry.ahead_tokens = self._ahead_tokens(entry)
        self.books.pace.left_line(len(line), now)
        self.books.drain.note(now)
        self.books.counters["admitted"] += 1

    def _ahead_tokens(self, entry: Entry) -> int:
        """Tokens that are read until a request has its first one, its own in full."""
        roster, tokens = self.books.roster, entry.tokens_to_read
        return roster.queue_tokens(entry.worker) + max(0, tokens - roster.long_tokens)

    @staticmethod
    def _reason(entry: Entry, now: float) -> str:
        """Why it was its turn."""
        if entry.request.attempt:
            return "began_before"
        return "lost_patience" if entry.due < now else "turn"

    def _final_arena(self, entry: Entry, raw_arena: str, now: float) -> str | None:
        """Where to book the pages that decoding will need, before a decode worker is chosen."""
        work_arena, sizes = self._work_arena(raw_arena), entry.whole or entry.sizes
        if self._goes_in_parts(entry, raw_arena, now):
            sizes = entry.sizes
            if self.books.roster.compressor("", raw_arena) is None:
                return None

        def fits(arena: str) -> bool:
            lines = lines_before_encoding(sizes, raw_arena, work_arena, arena)
            return self.books.ledger.fits(entry.id, lines)

        return self.books.roster.final_arena({raw_arena, work_arena}, fits)

    def _goes_in_parts(self, entry: Entry, arena: str, now: float) -> bool:
        """Whether its layers are encoded as they are read, if it is read in an arena.

        A compressor that died is waited for: a prompt that is read in another way gives an answer
        that differs a little, and nobody's death is to change one.
        """
        if entry.whole is None:
            return False
        absent = self.books.fleet.absent_since("compress", arena)
        return absent is None or now - absent < ENCODER_GRACE_S

    def _lacks_encoder(self, entry: Entry, now: float) -> bool:
        """Whether a compressor is what a request waits for, wherever it could be read."""
        roster = self.books.roster
        return all(
            self._goes_in_parts(entry, arena, now) and roster.compressor("", arena) is None
            for arena in roster.reading_arenas or [""]  # an arena without a name is not counted
        )


def join_of(entry: Entry, now: float) -> Join:
    """What a decode worker must know to go on with a request whose pages are finished."""
    assert entry.handle is not None
    assert entry.report is not None
    return Join(
        request=entry.request,
        words=entry.words,
        handle=entry.handle,
        report=entry.report,
        token_s=entry.token_s,
        age_s=max(0.0, now - entry.read_at),
        memory=entry.memory,
    )
