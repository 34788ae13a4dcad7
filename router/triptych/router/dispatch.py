"""Moves requests on to their next stage, whenever something has changed."""

from dataclasses import dataclass, field, replace

from triptych.core.config import RouterConfig
from triptych.core.messages import CompressItem, Join, Prefix, Resume, pack_tokens
from triptych.router.batching import BatchPolicy
from triptych.router.books import Books, worker_loads
from triptych.router.ledger import lines_before_encoding
from triptych.router.placement import (
    choose_compressor,
    choose_decode,
    choose_prefill,
    has_room,
)
from triptych.router.snapshot import Budget, HeldBy, Waiting, WorkerLoad
from triptych.router.state import Entry, State

MOVABLE = (State.ORPHANED, State.COMPRESSED, State.PLANNED, State.PREFILLED, State.WAITING)
"""States in which a request waits for the router; those nearest to the end come first."""


@dataclass
class Dispatch:
    """One pass over all that could move, in a fixed order."""

    books: Books
    policy: BatchPolicy
    config: RouterConfig
    keeps_prefixes: bool = False
    """Whether the pool keeps prefixes of prompts."""
    held_by: HeldBy = ""
    """Why the first of the waiting line did not start at the last pass."""
    _loads: dict[str, WorkerLoad] = field(default_factory=dict[str, WorkerLoad])

    def run(self, now: float) -> None:
        """Send on every request that can go on."""
        self.held_by = ""
        if not any(self.books.requests.count(state) for state in MOVABLE):
            return
        self._loads = worker_loads(self.books, now)
        self._resume_all(now)
        self._join_all(now)
        self._encode_all(now)
        self._compress_all(now)
        self.held_by = self._admit(now)

    # ---------------------------------------------------------------- orphaned -> decoding

    def _resume_all(self, now: float) -> None:
        for entry in self.books.requests.in_state(State.ORPHANED):
            load = self._decode_worker_in_place(entry)
            if load is None:
                continue
            assert entry.report is not None
            self._take_slot(entry, load)
            entry.worker, entry.stage = load.address, "decode"
            resume = Resume(request=entry.request, former=entry.former, report=entry.report)
            self.books.outbox.post(entry.worker, resume)
            self.books.requests.move(entry, State.DECODING, now)

    # ---------------------------------------------------------------- compressed -> decoding

    def _join_all(self, now: float) -> None:
        for entry in self.books.requests.in_state(State.COMPRESSED):
            if not entry.decode:  # the worker that was chosen died
                load = self._decode_worker_in_place(entry)
                if load is None:
                    continue
                self._take_slot(entry, load)
            self._join(entry, now)

    def _join(self, entry: Entry, now: float) -> None:
        handle, report = entry.handle, entry.report
        assert handle is not None
        assert report is not None
        entry.giver, entry.worker, entry.stage = entry.worker, entry.decode, "decode"
        join = Join(
            request=entry.request, first_token=entry.first_token, handle=handle, report=report
        )
        self.books.outbox.post(entry.worker, join)
        self.books.requests.move(entry, State.DECODING, now)

    # ---------------------------------------------------------------- planned -> encoding

    def _encode_all(self, now: float) -> None:
        """Choose decode workers, in the order of planning: nobody overtakes here."""
        for entry in self.books.requests.in_state(State.PLANNED):
            load = self._decode_worker(entry)
            if load is None:
                return
            if load.arena != entry.final_arena:
                lines = lines_before_encoding(entry.sizes, entry.raw_arena, load.arena)
                self.books.ledger.book(entry.id, lines)
                entry.final_arena = load.arena
            self._take_slot(entry, load)
            self._encode(entry, load, now)

    def _encode(self, entry: Entry, load: WorkerLoad, now: float) -> None:
        assert entry.handle is not None
        arena = load.arena or entry.handle.claim.arena
        self.books.outbox.encode(entry.worker, arena, entry.id)
        self.books.requests.move(entry, State.ENCODING, now)

    def _decode_worker(self, entry: Entry) -> WorkerLoad | None:
        """The best decode worker, wherever the final pages of a request can be booked."""
        ledger = self.books.ledger

        def fits(arena: str) -> bool:
            lines = lines_before_encoding(entry.sizes, entry.raw_arena, arena)
            return ledger.fits(entry.id, lines)

        return choose_decode(self._loads.values(), free_bytes=ledger.free, fits=fits)

    def _decode_worker_in_place(self, entry: Entry) -> WorkerLoad | None:
        """The best decode worker that maps the arena in which the final pages lie already."""

        def fits(arena: str) -> bool:
            return arena == entry.final_arena

        return choose_decode(self._loads.values(), free_bytes=self.books.ledger.free, fits=fits)

    def _take_slot(self, entry: Entry, load: WorkerLoad) -> None:
        entry.decode = load.address
        self._loads[load.address] = replace(load, free_slots=load.free_slots - 1)

    # ---------------------------------------------------------------- prefilled -> compressing

    def _compress_all(self, now: float) -> None:
        for entry in self.books.requests.in_state(State.PREFILLED):
            load = choose_compressor(self._loads.values(), holder=entry.worker)
            if load is None:
                return
            assert entry.handle is not None
            entry.giver, entry.worker, entry.stage = entry.worker, load.address, "compress"
            item = CompressItem(request=entry.id, handle=entry.handle, prefix=self._prefix(entry))
            self.books.outbox.compress(load.address, item)
            tokens = load.compress_tokens + entry.prompt_tokens
            self._loads[load.address] = replace(load, compress_tokens=tokens)
            self.books.requests.move(entry, State.COMPRESSING, now)

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
        )

    # ---------------------------------------------------------------- waiting -> prefilling

    def _admit(self, now: float) -> HeldBy:
        """Start as many waiting requests as bytes, decode slots and prefill workers allow."""
        waiting = self.books.requests.in_state(State.WAITING)
        if not waiting:
            return ""
        if not any(self._has_room(load, 1) for load in self._loads.values()):
            is_there = any("prefill" in load.stages for load in self._loads.values())
            return "prefill_busy" if is_there else "no_prefill_worker"
        slots = self._open_slots()
        if slots <= 0:
            return "no_decode_slot"
        batch = self._batch(waiting, slots, now)
        for entry in batch:
            held_by = self._start(entry, now)
            if held_by:
                return held_by
        if len(batch) == len(waiting):
            return ""
        return "no_decode_slot" if len(batch) == slots else "no_bytes"

    def _batch(self, waiting: list[Entry], slots: int, now: float) -> list[Entry]:
        """Ask the policy. It sees all arenas as one; ``_start`` checks each for itself."""
        queue = [
            Waiting(id=entry.id, bytes=entry.sizes.peak, waited_s=now - entry.arrived)
            for entry in waiting
        ]
        arenas = {load.arena for load in self._loads.values()}
        free = sum(self.books.ledger.free(arena) for arena in arenas)
        budget = Budget(free_bytes=free, max_requests=slots, patience_s=self.config.patience_s)
        by_id = {entry.id: entry for entry in waiting}
        return [by_id[chosen.id] for chosen in self.policy(queue, budget)]

    def _open_slots(self) -> int:
        """Decode slots that no admitted request will need.

        A request is let in only if a slot will be free for it. Otherwise finished prompts
        would pile up in raw pages, the most expensive form that they ever have.
        """
        free = sum(load.free_slots for load in self._loads.values())
        return free - sum(
            entry.state not in (State.WAITING, State.LEAVING) and not entry.decode
            for entry in self.books.requests
        )

    def _start(self, entry: Entry, now: float) -> HeldBy:
        """Book a request and send it to a prefill worker; or say why not."""
        load = choose_prefill(
            self._loads.values(),
            tokens=entry.prompt_tokens,
            limit_tokens=self.config.prefill_batch_tokens,
            fits=lambda arena: self._final_arena(entry, arena) is not None,
        )
        if load is None:
            tokens = entry.prompt_tokens
            has_room = any(self._has_room(load, tokens) for load in self._loads.values())
            return "no_bytes" if has_room else "prefill_busy"
        entry.raw_arena, entry.worker, entry.stage = load.arena, load.address, "prefill"
        entry.final_arena = self._final_arena(entry, load.arena) or ""
        lines = lines_before_encoding(entry.sizes, entry.raw_arena, entry.final_arena)
        self.books.ledger.book(entry.id, lines)
        self.books.outbox.prefill(load.address, entry.request)
        tokens = load.prefill_tokens + entry.prompt_tokens
        self._loads[load.address] = replace(load, prefill_tokens=tokens)
        self.books.requests.move(entry, State.PREFILLING, now)
        self.books.drain.note(now)
        self.books.counters["admitted"] += 1
        return ""

    def _has_room(self, load: WorkerLoad, tokens: int) -> bool:
        return has_room(load, tokens=tokens, limit_tokens=self.config.prefill_batch_tokens)

    def _final_arenas(self) -> list[str]:
        """Arenas of decode workers, the one with most free bytes first."""
        arenas = {load.arena for load in self._loads.values() if load.free_slots > 0}
        return sorted(arenas, key=lambda arena: (-self.books.ledger.free(arena), arena))

    def _final_arena(self, entry: Entry, raw_arena: str) -> str | None:
        """Where to book the pages that decoding will need, before a decode worker is chosen."""
        for arena in self._final_arenas():
            if self.books.ledger.fits(
                entry.id, lines_before_encoding(entry.sizes, raw_arena, arena)
            ):
                return arena
        return None
